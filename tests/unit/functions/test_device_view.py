"""Planners see the devices in use, and loops are built anew when those change."""

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.links.board import Board
from moeless.functions.planning.device_view import DeviceView
from moeless.functions.planning.elastic_loop import ElasticLoop
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES, EXPERTS = 10, 2
SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=(0, 1),
    num_experts=EXPERTS,
    top_k=1,
    expert=ExpertShape(hidden=1, intermediate=1),
)


class Host:
    def load(self, function):
        pass

    def evict(self, function, *, reason):
        pass


class Loop:
    """Notes what it is told."""

    adaptive = True

    def __init__(self, placement, told):
        self.placement, self.told = placement, told
        told.append(("built", placement.num_devices))

    def start(self):
        self.told.append(("start",))

    def replan(self, layer, *, step, load_E):
        self.told.append(("replan", layer, load_E.tolist()))

    def observe(self, *, step, layer, load_E):
        self.told.append(("observe", layer))

    def forecast(self, *, step, layer, load_E, expected_error=None):
        self.told.append(("forecast", layer))


@pytest.fixture
def platform():
    made = Platform(
        [4 * BYTES, 0, 4 * BYTES, 0],
        clock=ManualClock(0.0),
        keep_alive=FixedKeepAlive(1e9),
        sink=MemorySink(),
    )
    for device in (0, 2):
        made.device_up(device, Host())
    return made


@pytest.fixture
def model(platform):
    board = Board.in_process(num_layers=2, num_experts=EXPERTS, num_devices=4)
    return platform.add_model(SPEC, function_bytes=BYTES, board=board)


def make_plan(replicas_ED, *, layer=0, load=(3.0, 1.0)):
    return Plan(
        step=1,
        layer=layer,
        replicas_ED=np.array(replicas_ED, dtype=np.uint8),
        load_E=np.array(load),
    )


@pytest.mark.parametrize("devices", [(0, 2), (2,), (1, 2)])
def test_a_view_shows_the_columns_of_its_devices(model, devices):
    view = DeviceView(model, devices)
    model.board.warm_LED[0, 1] = [0, 1, 1, 0]
    assert view.num_devices == len(devices)
    assert view.alive_ED(0).tolist() == model.alive_ED(0)[:, list(devices)].tolist()
    assert view.planned_ED(0).shape == (EXPERTS, len(devices))
    assert view.capacity_D(0).tolist() == model.capacity_D(0)[list(devices)].tolist()


def test_a_plan_for_some_devices_is_put_in_force_on_those_and_nowhere_else(model):
    diff = DeviceView(model, (0, 2)).apply(make_plan([[1, 0], [0, 2]]), decision_s=0.0)
    assert model.planned_ED(0).tolist() == [[1, 0, 0, 0], [0, 0, 2, 0]]
    assert diff.start == ((0, 0), (1, 2))


def test_a_loop_goes_on_while_the_devices_in_use_are_the_same(platform, model):
    told = []
    loop = ElasticLoop(model, build=lambda placement, _: Loop(placement, told))
    loop.start()
    loop.observe(step=1, layer=0, load_E=np.ones(EXPERTS))
    platform.set_budget(0, 3 * BYTES)
    loop.forecast(step=1, layer=1, load_E=np.ones(EXPERTS))
    assert told == [("built", 2), ("start",), ("observe", 0), ("forecast", 1)]


def test_a_loop_is_built_anew_when_a_device_joins_and_when_one_leaves(platform, model):
    told = []
    loop = ElasticLoop(model, build=lambda placement, _: Loop(placement, told))
    platform.set_budget(3, 4 * BYTES)
    loop.observe(step=1, layer=0, load_E=np.ones(EXPERTS))
    platform.set_budget(0, 0)
    loop.forecast(step=1, layer=0, load_E=np.ones(EXPERTS))
    built = [what for what in told if what[0] == "built"]
    assert built == [("built", 2), ("built", 3), ("built", 2)]


def test_a_new_loop_is_given_the_one_before_it(platform, model):
    loops = []

    def build(placement, earlier):
        loops.append((Loop(placement, []), earlier))
        return loops[-1][0]

    loop = ElasticLoop(model, build=build)
    platform.set_budget(3, 4 * BYTES)
    loop.start()
    assert [earlier for _, earlier in loops] == [None, loops[0][0]]


def test_with_all_devices_in_use_a_loop_plans_for_the_model_itself(platform, model):
    platform.set_budget(1, BYTES)
    platform.set_budget(3, BYTES)
    loops = []
    ElasticLoop(model, build=lambda placement, _: loops.append(placement) or Loop(placement, []))
    assert loops == [model]


def test_starting_again_plans_for_the_loads_that_plans_were_made_for(model):
    told = []
    loop = ElasticLoop(model, build=lambda placement, _: Loop(placement, told))
    DeviceView(model, (0, 2)).apply(make_plan([[1, 0], [0, 1]]), decision_s=0.0)
    loop.start()
    assert told[1:] == [("replan", 0, [3.0, 1.0]), ("replan", 1, [0.0, 0.0])]


def test_a_device_without_a_budget_is_in_no_plan_any_more(platform, model):
    model.apply(make_plan([[1, 0, 1, 0], [0, 0, 1, 0]]), decision_s=0.0)
    platform.set_budget(2, 0)
    assert model.planned_ED(0).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert model.devices_in_use == (0,)
    assert model.capacity_D(0).tolist() == [2, 0, 0, 0]
