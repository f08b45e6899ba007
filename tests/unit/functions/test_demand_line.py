"""Engines that wait for loads stand in one line: the oldest is served, and then all others."""

import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

EXPERTS = 4


class Host:
    def __init__(self, parts):
        self.parts = parts

    def load(self, function):
        self.parts.orders.append(lambda: self.parts.platform.loaded(0, function))

    def evict(self, function, *, reason):
        self.parts.orders.append(lambda: self.parts.platform.evicted(0, function, reason=reason))


class Parts:
    """One device with room for five experts; layers have four. Engines 1 and 2."""

    def __init__(self, *, num_models):
        self.orders = []
        self.clock = ManualClock(5.0)
        self.platform = Platform(
            [50], clock=self.clock, keep_alive=FixedKeepAlive(1e6), sink=MemorySink()
        )
        self.platform.device_up(0, Host(self))
        self.models, self.boards = {}, {}
        for engine in (1, 2):
            name = f"m{engine % num_models}"
            shape = {"num_layers": 2, "num_experts": EXPERTS, "num_devices": 1}
            board = Board.in_process(**shape)
            model = self.platform.models.get(name) or self.platform.add_model(
                ModelSpec(
                    model_id=name,
                    family="mixtral",
                    layer_ids=(0, 1),
                    num_experts=EXPERTS,
                    top_k=1,
                    expert=ExpertShape(hidden=1, intermediate=1),
                ),
                function_bytes=10,
                board=board,
            )
            self.platform.join(model, engine, board)
            self.models[engine], self.boards[engine] = model, board

    def begin(self, engine, layer, experts):
        """An engine's gate speaks, and it waits for these experts."""
        self.boards[engine].step[0] += 1
        self.boards[engine].layer[0] = layer
        self.platform.demand(
            self.models[engine], engine=engine, ticket=7, layer=layer, experts=experts
        )
        self.settle()

    def go_on(self, engine):
        self.boards[engine].step[0] += 1
        self.boards[engine].layer[0] = -1
        self.platform.advance()
        self.settle()

    def tick(self, seconds):
        self.clock.advance(seconds)
        self.platform.tick()
        self.settle()

    def settle(self):
        while self.orders:
            self.orders.pop(0)()

    def ended(self):
        return [
            (result.engine, result.ticket, result.error) for result in self.platform.finished()
        ]


@pytest.mark.parametrize("num_models", [1, 2])
def test_two_that_each_hold_a_part_of_what_they_need_do_not_wait_for_each_other(num_models):
    parts = Parts(num_models=num_models)
    parts.begin(2, 1, [0, 1])
    assert parts.ended() == [(2, 7, None)]
    parts.begin(1, 0, [0, 1, 2, 3])  # the other one computes: only three have room
    assert parts.ended() == []
    parts.begin(2, 1, [2, 3])  # now it waits as well, for room that the first one holds
    assert parts.ended() == [(1, 7, None)], "the older one is served"
    parts.go_on(1)
    assert parts.ended() == [(2, 7, None)], "then the younger one"


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("ends", [True, False], ids=["rests", "is stopped"])
def test_an_engine_that_computes_keeps_its_layer_one_that_rests_or_is_stopped_does_not(
    num_models, ends
):
    parts = Parts(num_models=num_models)
    parts.begin(1, 1, [0, 1, 2, 3])
    assert parts.ended() == [(1, 7, None)]
    parts.begin(2, 0, [0, 1, 2, 3])
    parts.tick(1.0)
    assert parts.ended() == [], "the first one computes"
    if ends:
        parts.boards[1].layer[0] = -1
    for _ in range(1 if ends else 12):
        parts.tick(1.0)
    assert parts.ended() == [(2, 7, None)]


@pytest.mark.parametrize("num_models", [1, 2])
def test_a_demand_ends_nobody_elses_though_their_tickets_are_alike(num_models):
    parts = Parts(num_models=num_models)
    parts.begin(1, 0, [0])
    parts.begin(2, 0, [1])
    assert parts.ended() == [(1, 7, None), (2, 7, None)]


def test_what_two_engines_wait_for_is_loaded_though_one_of_them_leaves():
    parts = Parts(num_models=1)
    parts.boards[1].layer[0] = parts.boards[2].layer[0] = 0
    for engine in (1, 2):
        parts.platform.demand(
            parts.models[engine], engine=engine, ticket=engine, layer=0, experts=[0, 1, 2, 3]
        )
    parts.platform.leave(parts.models[1], 1)
    parts.settle()
    assert parts.ended() == [(2, 2, None)]
