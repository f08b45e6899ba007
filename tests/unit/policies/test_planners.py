import numpy as np
import pytest

from moeless.core.plan import PlanRequest
from moeless.errors import ConfigError, PlanError
from moeless.policies.planners.paper import PaperPlanner
from moeless.policies.planners.static import StaticPlanner


def request(load, capacity, alive=None, previous=None):
    shape = (len(load), len(capacity))
    none = np.zeros(shape, dtype=np.uint8)
    return PlanRequest(
        step=7,
        layer=4,
        load_E=np.asarray(load, dtype=np.float64),
        previous_ED=none if previous is None else np.asarray(previous, dtype=np.uint8),
        alive_ED=none if alive is None else np.asarray(alive, dtype=np.uint8),
        capacity_D=np.asarray(capacity, dtype=np.int64),
    )


BOTH = pytest.mark.parametrize("planner", [StaticPlanner(), PaperPlanner()])


@BOTH
def test_a_plan_carries_step_layer_and_load_of_its_request(planner):
    plan = planner.plan(request([3, 1], [2, 2]))
    assert (plan.step, plan.layer, plan.load_E.tolist()) == (7, 4, [3.0, 1.0])
    assert plan.replicas_ED.dtype == np.uint8
    assert plan.replicas_ED.flags.writeable


@BOTH
def test_too_few_slots_are_reported_with_the_numbers(planner):
    with pytest.raises(PlanError, match="layer 4: 2 devices hold 3 replicas in all, 4 experts"):
        planner.plan(request([1, 1, 1, 1], [1, 2]))


@BOTH
def test_no_device_at_all_is_a_plan_error(planner):
    with pytest.raises(PlanError, match="0 devices hold 0"):
        planner.plan(request([1, 1], []))


@BOTH
def test_a_negative_capacity_names_its_device(planner):
    with pytest.raises(PlanError, match="layer 4, device 1: capacity -1 is negative"):
        planner.plan(request([1, 1], [9, -1]))


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 2.0**54])
def test_an_impossible_load_is_refused_with_layer_and_expert(planner, bad):
    with pytest.raises(PlanError, match="layer 4, expert 1"):
        planner.plan(request([1.0, bad, 1.0], [3, 3]))


@BOTH
def test_arrays_of_another_shape_are_refused(planner):
    with pytest.raises(PlanError, match=r"alive_ED has shape \(3, 2\), expected \(2, 2\)"):
        planner.plan(request([1, 1], [2, 2], alive=np.zeros((3, 2))))


@BOTH
def test_without_any_load_every_expert_still_has_one_replica(planner):
    replicas = planner.plan(request([0, 0, 0, 0], [4, 4])).replicas_ED
    assert replicas.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert replicas.sum(axis=0).tolist() == [2, 2]


def test_static_gives_the_first_devices_one_expert_more():
    replicas = StaticPlanner().plan(request([1] * 8, [8, 8, 8])).replicas_ED
    assert [np.flatnonzero(column).tolist() for column in replicas.T] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]


def test_static_ignores_load_and_what_is_warm():
    warm = np.ones((4, 2))
    cold = StaticPlanner().plan(request([1, 1, 1, 1], [4, 4]))
    hot = StaticPlanner().plan(request([9, 0, 0, 5], [4, 4], alive=warm, previous=warm))
    assert (cold.replicas_ED == hot.replicas_ED).all()


def test_static_says_what_a_device_would_have_to_hold():
    with pytest.raises(PlanError, match=r"device 1: .* puts 2 of 4 experts here, but it holds 1"):
        StaticPlanner().plan(request([1] * 4, [3, 1]))


def test_static_leaves_out_a_device_without_capacity():
    replicas = StaticPlanner().plan(request([1] * 4, [4, 0, 4])).replicas_ED
    assert replicas.sum(axis=0).tolist() == [2, 0, 2]


def test_static_serves_fewer_experts_than_devices():
    replicas = StaticPlanner().plan(request([1, 1], [1, 1, 1])).replicas_ED
    assert replicas.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_the_paper_planner_keeps_a_balanced_layer_where_it_is_warm():
    warm = np.eye(4, dtype=np.uint8)[::-1]
    plan = PaperPlanner().plan(request([10, 10, 10, 10], [4] * 4, alive=warm))
    assert (plan.replicas_ED == warm).all()


def test_the_paper_planner_reuses_the_previous_placement_too():
    warm = np.eye(4, dtype=np.uint8)[::-1]
    plan = PaperPlanner().plan(request([10, 10, 10, 10], [4] * 4, previous=warm))
    assert (plan.replicas_ED == warm).all()


def test_a_memory_factor_of_one_never_replicates():
    plan = PaperPlanner(memory_factor=1.0).plan(request([100, 1, 1, 1], [4] * 4))
    assert plan.replicas_ED.sum() == 4


def test_a_memory_factor_is_not_rounded_down_by_binary_fractions():
    # 1.15 x 20 is 22.999... in binary.
    plan = PaperPlanner(memory_factor=1.15).plan(request([100] * 3 + [1] * 17, [20] * 8))
    assert plan.replicas_ED.sum() == 23


def test_tight_capacity_keeps_a_slot_for_every_cold_expert():
    # Six slots for five experts: the hot one may take one extra replica, not three.
    plan = PaperPlanner().plan(request([100, 1, 1, 1, 1], [2, 2, 2]))
    assert plan.replicas_ED.sum(axis=1).tolist() == [2, 1, 1, 1, 1]
    assert plan.replicas_ED.sum(axis=0).tolist() == [2, 2, 2]


def test_replicas_that_no_device_can_take_are_left_out():
    # Algorithm 1 asks for 3, 3, 2, 1, 1, but the third device holds one replica only, so that
    # two experts cannot both have three.
    plan = PaperPlanner().plan(request([60, 58, 40, 12, 12], [5, 5, 1]))
    counts = plan.replicas_ED.sum(axis=1)
    assert (counts >= 1).all()
    assert (plan.replicas_ED.sum(axis=0) <= [5, 5, 1]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"cv_threshold": -0.1},
        {"cv_threshold": float("nan")},
        {"memory_factor": 0.9},
        {"memory_factor": float("inf")},
    ],
)
def test_the_paper_planner_refuses_options_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        PaperPlanner(**options)
