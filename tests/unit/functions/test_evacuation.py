"""What leaves a device whose budget became smaller, and what is loaded elsewhere first."""

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.lifecycle import State
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES, LAYERS, EXPERTS = 10, 4, 2


class Host:
    def __init__(self):
        self.loads, self.evictions = [], []

    def load(self, function):
        self.loads.append(function)

    def evict(self, function, *, reason):
        self.evictions.append((function, reason))


class Parts:
    """Four layers of two experts, all warm on device 0."""

    def __init__(self, *, slots=(8, 8)):
        self.clock = ManualClock(1.0)
        self.platform = Platform(
            [n * BYTES for n in slots],
            clock=self.clock,
            keep_alive=FixedKeepAlive(1e9),
            sink=MemorySink(),
        )
        spec = ModelSpec(
            model_id="m",
            family="mixtral",
            layer_ids=tuple(range(LAYERS)),
            num_experts=EXPERTS,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        self.board = Board.in_process(
            num_layers=LAYERS, num_experts=EXPERTS, num_devices=len(slots)
        )
        self.model = self.platform.add_model(spec, function_bytes=BYTES, board=self.board)
        self.model.join(0, self.board)
        self.hosts = [Host() for _ in slots]
        for device, host in enumerate(self.hosts):
            self.platform.device_up(device, host)
        for layer in range(LAYERS):
            self.plan(layer, [[1] + [0] * (len(slots) - 1)] * EXPERTS)
        self.finish()

    def plan(self, layer, replicas_ED, *, release=False):
        plan = Plan(
            step=1,
            layer=layer,
            replicas_ED=np.array(replicas_ED, dtype=np.uint8),
            load_E=np.ones(EXPERTS),
            release=release,
        )
        self.model.apply(plan, decision_s=0.0)

    def finish(self):
        """Orders end well, loads before evictions."""
        while any(host.loads or host.evictions for host in self.hosts):
            for device, host in enumerate(self.hosts):
                while host.loads:
                    self.platform.loaded(device, host.loads.pop(0))
                while host.evictions:
                    function, reason = host.evictions.pop(0)
                    self.platform.evicted(device, function, reason=reason)

    def held(self, device):
        return self.platform.pools[device].held_bytes // BYTES


def test_last_copies_leave_only_when_they_are_warm_elsewhere():
    parts = Parts()
    parts.platform.set_budget(0, 0)
    assert parts.hosts[0].evictions == []
    assert len(parts.hosts[1].loads) == 2  # as many at a time as a device loads
    function = parts.hosts[1].loads.pop(0)
    parts.platform.loaded(1, function)
    assert parts.hosts[0].evictions == [(function, "drained")]
    parts.finish()
    assert (parts.held(0), parts.held(1)) == (0, 8)
    assert parts.board.warm_LED[:, :, 1].all()


@pytest.mark.parametrize("budget", [0, 3 * BYTES])
def test_what_was_loaded_so_that_others_can_leave_is_not_released_again(budget):
    parts = Parts()
    for layer in range(LAYERS):
        parts.plan(layer, [[1, 0], [1, 0]], release=True)
    loads = []
    parts.hosts[1].load = lambda function: (
        loads.append(function),
        Host.load(parts.hosts[1], function),
    )
    parts.platform.set_budget(0, budget)
    for _ in range(50):  # each turn ends what there is, and begins what follows from it
        for device, host in enumerate(parts.hosts):
            for function in [host.loads.pop() for _ in list(host.loads)]:
                parts.platform.loaded(device, function)
            for function, reason in [host.evictions.pop() for _ in list(host.evictions)]:
                parts.platform.evicted(device, function, reason=reason)
    assert parts.held(0) == budget // BYTES
    assert len(loads) == len(set(loads)) == LAYERS * EXPERTS - budget // BYTES
    assert parts.board.warm_LED.any(axis=2).all()


def test_last_copies_are_loaded_elsewhere_though_the_last_engine_leaves_meanwhile():
    parts = Parts()
    parts.platform.set_budget(0, 0)
    parts.platform.leave(parts.model, 0)
    parts.platform.advance()
    pool = parts.platform.pools[1]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            function = parts.model.function(layer, expert)
            assert pool.wants(function) or pool.state(function) is State.LOADING, function
    parts.finish()
    assert (parts.held(0), parts.held(1)) == (0, LAYERS * EXPERTS)


def test_what_is_needed_soonest_is_loaded_elsewhere_first():
    parts = Parts()
    parts.board.layer[0] = 1
    parts.platform.set_budget(0, 0)
    assert [function.layer for function in parts.hosts[1].loads] == [2, 2]


def test_what_is_warm_elsewhere_leaves_at_once():
    parts = Parts()
    parts.plan(0, [[1, 1], [1, 1]])
    parts.finish()
    parts.platform.set_budget(0, 0)
    assert {function.layer for function, _ in parts.hosts[0].evictions} == {0}


def test_without_room_elsewhere_the_copies_needed_last_are_given_up():
    parts = Parts(slots=(8, 2))
    parts.board.layer[0] = 3
    parts.platform.set_budget(0, 0)
    evicted = {function.layer for function, _ in parts.hosts[0].evictions}
    assert evicted == {1, 2, 3}
    assert [function.layer for function in parts.hosts[1].loads] == [0, 0]
    parts.finish()
    assert (parts.held(0), parts.held(1)) == (0, 2)


def test_a_smaller_budget_is_reached_and_nothing_is_lost_where_others_have_room():
    parts = Parts()
    parts.platform.set_budget(0, 3 * BYTES)
    parts.finish()
    assert (parts.held(0), parts.held(1)) == (3, 5)
    assert parts.board.warm_LED.any(axis=2).all()


def test_a_larger_budget_is_used_at_once():
    parts = Parts(slots=(2, 2))
    assert parts.held(0) == 2
    parts.platform.set_budget(0, 8 * BYTES)
    parts.finish()
    for layer in range(LAYERS):
        parts.plan(layer, [[1, 0]] * EXPERTS)
    parts.finish()
    assert parts.held(0) == 8


def test_a_load_under_way_on_a_device_that_is_drained_is_moved_when_it_has_ended():
    parts = Parts(slots=(2, 8))
    parts.platform.set_budget(0, 8 * BYTES)
    parts.plan(2, [[1, 0]] * EXPERTS)
    assert parts.hosts[0].loads
    parts.platform.set_budget(0, 0)
    parts.finish()
    assert parts.held(0) == 0
    assert parts.platform.pools[0].free_bytes == 0


def test_tokens_that_wait_for_a_drained_device_are_served_by_another():
    parts = Parts(slots=(2, 8))
    parts.platform.set_budget(1, 0)
    parts.platform.set_budget(1, 8 * BYTES)
    parts.platform.demand(parts.model, ticket=1, layer=3, experts=[0, 1])
    asked = [device for device, host in enumerate(parts.hosts) if host.loads or host.evictions]
    assert asked
    parts.platform.set_budget(1, 0)
    parts.finish()
    results = parts.platform.finished()
    assert [result.error for result in results] == [None]


@pytest.mark.parametrize("failures", [1, 3])
def test_a_last_copy_that_cannot_be_loaded_elsewhere_stays(failures):
    parts = Parts(slots=(8, 8))
    parts.platform.set_budget(0, 0)
    function = parts.hosts[1].loads[0]
    for _ in range(failures):
        while function not in parts.hosts[1].loads:
            loading = parts.hosts[1].loads.pop(0)
            parts.platform.loaded(1, loading)
            parts.clock.advance(1.0)
            parts.platform.tick()
        parts.hosts[1].loads.remove(function)
        parts.platform.failed(1, function, reason="the disk is gone")
        assert parts.board.warm_LED[function.layer, function.expert, 0]
    parts.clock.advance(1.0)
    parts.platform.tick()
    parts.finish()
    assert parts.held(0) == 0
