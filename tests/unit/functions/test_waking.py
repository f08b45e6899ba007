"""A step that finds its model cold has the layers behind loaded in their order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES = 100


class Host:
    """Notes orders; the test says when they end."""

    def __init__(self):
        self.loads = []
        self.evictions = []

    def load(self, function):
        self.loads.append(function)

    def evict(self, function, *, reason):
        self.evictions.append((function, reason))


class Cold:
    """A model without a warm instance, with one engine."""

    def __init__(self, *, layers=4, experts=4, devices=2, slots=100, keep_s=1e9):
        self.clock = ManualClock(0.0)
        self.platform = Platform(
            [slots * BYTES] * devices,
            clock=self.clock,
            keep_alive=FixedKeepAlive(keep_s),
            sink=MemorySink(),
        )
        spec = ModelSpec(
            model_id="m",
            family="mixtral",
            layer_ids=tuple(range(layers)),
            num_experts=experts,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        self.board = Board.in_process(num_layers=layers, num_experts=experts, num_devices=devices)
        self.model = self.platform.add_model(spec, function_bytes=BYTES, board=self.board)
        self.model.join(0, self.board)
        self.hosts = [Host() for _ in range(devices)]
        for device, host in enumerate(self.hosts):
            self.platform.device_up(device, host)
        self.loaded = []
        self.tickets = 0

    def ask(self, layer, experts):
        """A layer's gate has spoken, and its tokens need experts."""
        self.board.layer[0] = layer
        self.tickets += 1
        missing = [e for e in experts if not self.board.warm_LED[layer, e].any()]
        if missing:
            self.platform.demand(self.model, ticket=self.tickets, layer=layer, experts=missing)
        return bool(missing)

    def end_one(self, host=None):
        """The oldest order of a host, or of all, ends."""
        for device, each in enumerate(self.hosts):
            if host in (None, device):
                while each.evictions:
                    function, reason = each.evictions.pop(0)
                    self.platform.evicted(device, function, reason=reason)
                if each.loads:
                    function = each.loads.pop(0)
                    self.loaded.append((function.layer, function.expert))
                    self.platform.loaded(device, function)

    def end_all(self, most=1000):
        """Orders end until there are none."""
        while any(host.loads or host.evictions for host in self.hosts) and most:
            self.end_one()
            most -= 1

    def plan(self, layer, replicas_ED, load_E):
        self.model.apply(
            Plan(
                step=1,
                layer=layer,
                replicas_ED=np.array(replicas_ED, dtype=np.uint8),
                load_E=np.array(load_E, dtype=np.float64),
            ),
            decision_s=0.0,
        )


def test_all_layers_are_loaded_in_the_order_in_which_they_run():
    cold = Cold(devices=1)
    cold.ask(0, range(4))
    cold.end_all()
    assert cold.loaded == [(layer, expert) for layer in range(4) for expert in range(4)]


def test_devices_share_what_is_not_planned_anywhere():
    cold = Cold()
    cold.ask(0, range(4))
    cold.end_all()
    assert sorted(cold.loaded) == [(layer, expert) for layer in range(4) for expert in range(4)]
    assert cold.board.warm_LED[1:].sum(axis=1).tolist() == [[2, 2]] * 3


def test_loads_go_where_the_plan_in_force_has_them():
    cold = Cold()
    cold.board.planned_LED[2, :, 1] = 1
    cold.ask(0, range(4))
    cold.end_all()
    assert cold.board.warm_LED[2].tolist() == [[0, 1]] * 4


def test_first_copies_go_to_the_planned_places_that_have_been_given_least():
    cold = Cold(experts=2)
    cold.board.planned_LED[1] = [[1, 1], [1, 0]]  # the first one has a choice
    cold.board.planned_LED[2] = [[1, 0], [1, 0]]  # neither has
    cold.board.planned_LED[3] = [[1, 1], [1, 1]]  # device 0 has been given three, the other one
    cold.ask(0, range(2))
    cold.end_all()
    assert cold.board.warm_LED[1:].tolist() == [
        [[0, 1], [1, 0]],
        [[1, 0], [1, 0]],
        [[0, 1], [0, 1]],
    ]


def test_as_many_experts_of_each_layer_as_the_first_needs_the_busiest_ones():
    cold = Cold(devices=1)
    cold.model.seen_LE[1:] = [5, 0, 9, 7]
    cold.ask(0, [3, 1])
    cold.end_all()
    assert cold.loaded == [(0, 1), (0, 3), *((layer, e) for layer in (1, 2, 3) for e in (2, 3))]


def test_what_tokens_wait_for_comes_before_what_is_ahead():
    cold = Cold(devices=1)
    cold.model.seen_LE[1:] = [5, 0, 9, 7]
    cold.ask(0, [0, 1])
    for _ in range(2):
        cold.end_one()
    assert cold.ask(1, [1, 2])  # one that was not expected, and one that is on its way
    begun = len(cold.loaded) + len(cold.hosts[0].loads)
    cold.end_all()
    assert cold.loaded[begun] == (1, 1)


def test_what_its_layers_gate_did_not_choose_is_dropped():
    cold = Cold(devices=1)
    cold.ask(0, range(4))
    for _ in range(4):
        cold.end_one()
    cold.ask(1, [3])
    cold.end_all()
    begun = {(1, 0), (1, 1)}  # when the gate of layer 1 spoke
    assert set(cold.loaded) & {(1, e) for e in range(4)} == begun | {(1, 3)}
    assert {(3, e) for e in range(4)} <= set(cold.loaded)


def test_nothing_is_left_to_load_once_the_step_is_over():
    cold = Cold(devices=1)
    cold.ask(0, range(4))
    for layer in range(1, 4):
        cold.board.layer[0] = layer
        cold.platform.advance()
    cold.board.layer[0] = 0  # the next step
    cold.end_all()
    in_flight = 2
    assert len(cold.loaded) <= 4 + in_flight


def test_a_layer_with_a_warm_replica_wakes_nobody():
    cold = Cold(devices=1)
    cold.ask(3, [0])
    cold.end_all()
    cold.ask(3, [1])
    cold.end_all()
    assert cold.loaded == [(3, 0), (3, 1)]


def test_a_model_that_may_not_be_woken_loads_what_is_asked_for():
    cold = Cold(devices=1)
    cold.model.wakes = False
    cold.ask(0, [0, 2])
    cold.end_all()
    assert cold.loaded == [(0, 0), (0, 2)]


def test_an_engine_that_is_gone_needs_nothing():
    cold = Cold(devices=1)
    cold.ask(0, range(4))
    cold.platform.leave(cold.model, 0)
    cold.end_all()
    assert len(cold.loaded) == 2  # what had begun


def test_no_more_is_woken_than_the_devices_hold():
    cold = Cold(layers=8, devices=1, slots=10)
    cold.ask(0, range(4))
    cold.end_all()
    assert cold.loaded == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        *((1, e) for e in range(4)),
        (2, 0),
        (2, 1),
    ]
    assert cold.board.warm_LED.sum() == 10


def test_what_was_loaded_ahead_does_not_leave_while_tokens_wait():
    cold = Cold(devices=1, keep_s=5.0)
    cold.ask(0, range(4))
    for _ in range(2):
        cold.end_one()
    cold.clock.advance(6.0)
    cold.platform.tick()
    assert not cold.hosts[0].evictions
    cold.end_all()
    cold.clock.advance(6.0)
    cold.platform.tick()
    assert len(cold.hosts[0].evictions) == 16


def test_every_expert_has_a_first_copy_before_any_has_a_second_one():
    cold = Cold(layers=3)
    for layer in range(3):
        cold.plan(layer, [[1, 1], [1, 0], [0, 1], [1, 1]], [8, 4, 4, 8])
    cold.end_all()
    firsts = [(layer, expert) for layer in range(3) for expert in range(4)]
    assert sorted(cold.loaded[: len(firsts)]) == firsts
    assert sorted(cold.loaded[len(firsts) :]) == [(layer, e) for layer in range(3) for e in (0, 3)]


@drawn(60)
@given(data=st.data())
def test_loads_ahead_are_for_layers_still_to_come_within_the_budgets(data):
    layers, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    devices = data.draw(st.integers(1, 3))
    least = -(-experts // devices)
    slots = data.draw(st.integers(least, layers * experts + 2))
    cold = Cold(layers=layers, experts=experts, devices=devices, slots=slots)
    for step in range(2):
        for layer in range(layers):
            needed = data.draw(st.sets(st.integers(0, experts - 1), min_size=1))
            known = [list(host.loads) for host in cold.hosts]
            waits = cold.ask(layer, sorted(needed))
            for _ in range(1000):
                for pool, host, before in zip(cold.platform.pools, cold.hosts, known, strict=True):
                    assert pool.held_bytes <= slots * BYTES
                    for function in host.loads:
                        if function in before:
                            continue
                        assert function.layer > layer or (
                            function.layer == layer and function.expert in needed
                        )
                    before[:] = host.loads
                if cold.platform.finished() or not waits:
                    break
                cold.end_one(data.draw(st.integers(0, devices - 1)))
            else:
                raise AssertionError(f"step {step}, layer {layer}: tokens wait for ever")
            assert not waits or all(cold.board.warm_LED[layer, e].any() for e in needed)
