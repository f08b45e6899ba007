"""When instances count as idle, and from when on."""

import math

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.links.board import Board
from moeless.functions.platform.idle_instances import idle_since_ns_LED
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

LAYERS, EXPERTS, KEEP_S = 3, 2, 1.0


class Host:
    def __init__(self):
        self.orders = []

    def load(self, function):
        self.orders.append(("load", function, ""))

    def evict(self, function, *, reason):
        self.orders.append(("evict", function, reason))


class Parts:
    """Three layers of two experts, all warm on one device at 1 s."""

    def __init__(self, keep_alive=None):
        self.clock = ManualClock(1.0)
        self.platform = Platform(
            [100],
            clock=self.clock,
            keep_alive=keep_alive or FixedKeepAlive(KEEP_S),
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
        self.board = Board.in_process(num_layers=LAYERS, num_experts=EXPERTS, num_devices=1)
        self.model = self.platform.add_model(spec, function_bytes=1, board=self.board)
        self.model.join(0, self.board)
        self.host = Host()
        self.platform.device_up(0, self.host)
        for layer in range(LAYERS):
            plan = Plan(
                step=1,
                layer=layer,
                replicas_ED=np.ones((EXPERTS, 1), dtype=np.uint8),
                load_E=np.ones(EXPERTS),
            )
            self.model.apply(plan, decision_s=0.0)
        self.settle()

    def settle(self):
        while self.host.orders:
            kind, function, reason = self.host.orders.pop(0)
            if kind == "load":
                self.platform.loaded(0, function)
            else:
                self.platform.evicted(0, function, reason=reason)

    def run(self, layer, *, seconds, experts=(0, 1)):
        """A layer is computed, while the platform's clock ticks."""
        for _ in range(10):
            self.clock.advance(seconds / 10)
            self.tick()
        used_ED = np.zeros((EXPERTS, 1), dtype=bool)
        used_ED[list(experts)] = True
        self.board.post_used(layer, used_ED, at_ns=int(self.clock.now_s() * 1e9), step=1)

    def tick(self):
        self.platform.tick()
        self.settle()

    def warm(self, layer):
        return [expert for expert in range(EXPERTS) if self.board.warm_LED[layer, expert, 0]]


def test_steps_longer_than_the_keep_alive_find_their_experts():
    parts = Parts()
    for _ in range(3):
        for layer in range(LAYERS):
            parts.run(layer, seconds=0.9)
            assert parts.model.cold_starts_L.sum() == LAYERS * EXPERTS
    assert [parts.warm(layer) for layer in range(LAYERS)] == [[0, 1]] * LAYERS


def test_all_of_a_step_leave_together_after_it():
    parts = Parts()
    for layer in range(LAYERS):
        parts.run(layer, seconds=0.9)
    parts.clock.advance(KEEP_S - 0.01)
    parts.tick()
    assert parts.board.warm_LED.all()
    parts.clock.advance(0.02)
    parts.tick()
    assert not parts.board.warm_LED.any()


def test_what_its_layer_has_passed_over_leaves_while_steps_go_on():
    parts = Parts()
    for step in range(3):
        for layer in range(LAYERS):
            parts.run(layer, seconds=0.3, experts=(0,) if layer == 1 and step else (0, 1))
    assert [parts.warm(layer) for layer in range(LAYERS)] == [[0, 1], [0], [0, 1]]


def test_what_was_loaded_for_the_next_turn_stays_until_then():
    parts = Parts()
    for layer in range(LAYERS):
        parts.run(layer, seconds=0.2)
    parts.clock.advance(2 * KEEP_S)
    parts.tick()
    assert not parts.board.warm_LED.any()
    parts.model.apply(
        Plan(
            step=2,
            layer=2,
            replicas_ED=np.ones((EXPERTS, 1), dtype=np.uint8),
            load_E=np.ones(EXPERTS),
        ),
        decision_s=0.0,
    )
    parts.settle()
    for _ in range(4):
        parts.run(0, seconds=0.9)
    assert parts.warm(2) == [0, 1]


def test_a_keep_alive_rule_hears_of_uses_and_not_of_steps_that_went_on():
    heard = []

    class Rule(FixedKeepAlive):
        def used(self, function, *, at_s):
            heard.append((function.layer, function.expert, at_s))

    parts = Parts(Rule(math.inf))
    parts.run(0, seconds=1.0)
    parts.run(1, seconds=1.0, experts=(1,))
    parts.tick()
    parts.run(2, seconds=1.0)
    parts.tick()
    assert sorted(heard) == [(0, 0, 2.0), (0, 1, 2.0), (1, 1, 3.0), (2, 0, 4.0), (2, 1, 4.0)]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_idle_times_are_those_of_looking_at_each_instance(engines):
    rng = np.random.default_rng(engines)
    for _ in range(50):
        own = [rng.integers(0, 6, (3, 2, 2)) for _ in range(engines)]
        used = np.maximum(np.maximum.reduce(own), rng.integers(0, 8, (3, 2, 2)))
        found = idle_since_ns_LED(used, own)
        for place in np.ndindex(used.shape):
            waits_for = [each for each in own if used[place] >= each[place[0]].max()]
            assert found[place] == max([used[place], *(each.max() for each in waits_for)])
