"""Plans for several steps: how long they stand, and what ends them early."""

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

EVERYWHERE = [[1, 1], [1, 1]]


class Host:
    def __init__(self):
        self.loads = []

    def load(self, function):
        self.loads.append(function)

    def evict(self, function, *, reason):
        pass


class Parts:
    """Two layers of two experts on two devices, in the engine's tenth step."""

    def __init__(self):
        self.platform = Platform(
            [1000] * 2, clock=ManualClock(0.0), keep_alive=FixedKeepAlive(5.0), sink=MemorySink()
        )
        spec = ModelSpec(
            model_id="m",
            family="mixtral",
            layer_ids=(0, 1),
            num_experts=2,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        self.board = Board.in_process(num_layers=2, num_experts=2, num_devices=2)
        self.model = self.platform.add_model(spec, function_bytes=100, board=self.board)
        self.model.join(0, self.board)
        self.hosts = [Host(), Host()]
        for device, host in enumerate(self.hosts):
            self.platform.device_up(device, host)
        for layer in (0, 1):
            self.apply(layer, step=1)
        self.load_all()
        self.board.step[0] = 10

    def apply(self, layer, *, step, steps=1):
        plan = Plan(
            step=step,
            layer=layer,
            replicas_ED=np.array(EVERYWHERE, dtype=np.uint8),
            load_E=np.ones(2),
            steps=steps,
        )
        self.model.apply(plan, decision_s=0.0)

    def load_all(self):
        for device, host in enumerate(self.hosts):
            while host.loads:
                self.platform.loaded(device, host.loads.pop(0))

    @property
    def until(self):
        return self.board.plan_step_L.tolist()


def test_a_plan_whose_replicas_are_warm_stands_for_its_steps():
    parts = Parts()
    parts.apply(0, step=10, steps=7)
    parts.apply(1, step=11)
    assert parts.until == [16, 11]


def test_a_plan_that_has_to_load_is_looked_at_in_the_next_step():
    parts = Parts()
    parts.platform.clock.advance(60.0)
    parts.platform.tick()
    parts.apply(0, step=10, steps=7)
    assert parts.until[0] == 10


@pytest.mark.parametrize("what", ["device lost", "device back", "load failed", "evicted"])
def test_a_standing_plan_ends_when_something_happens_to_its_replicas(what):
    parts = Parts()
    for layer in (0, 1):
        parts.apply(layer, step=10, steps=20)
    if what == "device lost":
        parts.platform.device_down(1)
    elif what == "device back":
        parts.platform.device_up(1, parts.hosts[1])
    elif what == "load failed":
        parts.platform.device_down(1)
        parts.platform.device_up(1, parts.hosts[1])
        for layer in (0, 1):
            parts.board.plan_step_L[layer] = 29
        for function in parts.hosts[1].loads:
            parts.platform.failed(1, function, reason="no such shard")
    else:
        parts.platform.clock.advance(60.0)
        parts.platform.tick()
    assert parts.until == [10, 10], "the plan of this step stays, the next one is made anew"


def test_what_ends_a_standing_plan_ends_no_plan_that_was_made_for_a_later_step():
    parts = Parts()
    parts.apply(0, step=11)
    parts.apply(1, step=11, steps=20)
    parts.platform.device_down(1)
    assert parts.until == [11, 11]


def test_a_new_engine_finds_no_standing_plans():
    parts = Parts()
    parts.apply(0, step=10, steps=20)
    board = Board.in_process(num_layers=2, num_experts=2, num_devices=2)
    parts.model.join(1, board)
    parts.platform.leave(parts.model, 0)
    assert board.plan_step_L.tolist() == [0, 0]
    parts.model.unsettle()
    assert board.plan_step_L.tolist() == [0, 0]


def test_a_plan_stands_for_the_engine_that_it_was_made_for_in_its_own_steps():
    parts = Parts()
    other = Board.in_process(num_layers=2, num_experts=2, num_devices=2)
    parts.model.join(1, other)
    other.step[0] = 3
    parts.model.speaker = 1, 10
    parts.apply(0, step=14, steps=5)
    assert other.plan_step_L.tolist() == [8, 0]
    assert parts.until == [1, 1]
    parts.platform.device_down(1)
    assert other.plan_step_L.tolist() == [4, 0]
