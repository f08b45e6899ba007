"""Plans that do not follow loads follow what the devices may hold of the model."""

import numpy as np
import pytest

from moeless.bootstrap.serving.control import build_controller
from moeless.config import PolicyConfig
from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.supervisor.hosted_model import HostedModel
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=(0,),
    num_experts=4,
    top_k=1,
    expert=ExpertShape(hidden=1, intermediate=1),
)


class Host:
    def load(self, function):
        pass

    def evict(self, function, *, reason):
        pass


class Placement:
    def __init__(self):
        self.capacity = [2, 2]

    def capacity_D(self, layer):
        return np.array(self.capacity)


class Consumer:
    def __init__(self, *, adaptive):
        self.adaptive = adaptive
        self.starts = 0

    def start(self):
        self.starts += 1


@pytest.fixture
def model():
    request = {"directory": "d", "layout": "l"}
    made = HostedModel(SPEC, request, num_devices=2)
    made.placement, made.consumer = Placement(), Consumer(adaptive=False)
    yield made
    made.close()


def test_a_fixed_plan_is_made_again_once_for_each_change_of_what_it_may_have(model):
    model.plan()
    model.follow_capacity()
    assert model.consumer.starts == 1
    for expected, capacity in enumerate([[2, 1], [2, 2], [0, 4]], start=2):
        model.placement.capacity = capacity
        model.follow_capacity()
        model.follow_capacity()
        assert model.consumer.starts == expected


def test_a_plan_that_follows_loads_anyway_is_left_to_them(model):
    model.consumer.adaptive = True
    model.plan()
    model.placement.capacity = [1, 3]
    model.follow_capacity()
    assert model.consumer.starts == 1


def test_a_model_that_nobody_uses_is_not_planned(model):
    model.consumer = None
    model.plan()
    model.placement.capacity = [1, 3]
    model.follow_capacity()


def two_experts(name):
    return ModelSpec(
        model_id=name,
        family="mixtral",
        layer_ids=(0,),
        num_experts=2,
        top_k=1,
        expert=ExpertShape(hidden=1, intermediate=1),
    )


def test_static_plans_follow_when_another_model_gives_memory_back():
    clock = ManualClock(100.0)
    platform = Platform(
        [20, 10], clock=clock, keep_alive=FixedKeepAlive(1e9), sink=MemorySink(), linger_s=1.0
    )
    for device in range(2):
        platform.device_up(device, Host())
    shape = {"num_layers": 1, "num_experts": 2, "num_devices": 2}
    boards = {name: Board.in_process(**shape) for name in ("one", "other")}
    placements = {
        name: platform.add_model(two_experts(name), function_bytes=10, board=boards[name])
        for name in boards
    }
    request = {"directory": "d", "layout": "l"}
    model = HostedModel(two_experts("one"), request, num_devices=2)
    model.placement = placements["one"]
    # The other one uses device 1 before this one is planned for the first time.
    platform.join(placements["other"], 1, boards["other"])
    boards["other"].step[0] += 1
    function = placements["other"].function(0, 0)
    platform.pools[1].want(function, num_bytes=10, blocking=True)
    platform.advance()
    platform.loaded(1, function)
    boards["other"].planned_LED[0, 0, 1] = 1
    platform.tick()
    platform.join(placements["one"], 0, boards["one"])
    model.consumer = build_controller(
        PolicyConfig(policy="static"),
        placements["one"],
        torch_devices=["cpu"] * 2,
        lookahead=0,
        clock=clock,
        sink=MemorySink(),
        record=False,
    )
    model.plan()
    squeezed = boards["one"].planned_LED[0].sum(axis=0).tolist()
    platform.leave(placements["other"], 1)
    clock.advance(100.0)
    for _ in range(20):
        platform.tick()
    model.follow_capacity()
    assert squeezed == [2, 0]
    assert boards["one"].planned_LED[0].sum(axis=0).tolist() == [1, 1]
    model.close()
