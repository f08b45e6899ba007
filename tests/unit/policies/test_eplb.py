import numpy as np
import pytest

from moeless.core.plan import PlanRequest
from moeless.errors import ConfigError, PlanError
from moeless.policies.planners import PLANNERS
from moeless.policies.planners.eplb import EplbPlanner
from moeless.policies.planners.eplb_rebalance import rebalance_experts
from moeless.policies.planners.eplb_slots import expected_load_D


def request(load, capacity, previous=None):
    shape = (len(load), len(capacity))
    previous = np.zeros(shape) if previous is None else previous
    return PlanRequest(
        step=7,
        layer=4,
        load_E=np.asarray(load, dtype=np.float64),
        previous_ED=np.asarray(previous, dtype=np.uint8),
        alive_ED=np.zeros(shape, dtype=np.uint8),
        capacity_D=np.asarray(capacity, dtype=np.int64),
    )


def held(matrix):
    return [np.flatnonzero(column).tolist() for column in matrix.T]


def test_the_registry_makes_it_with_its_options():
    planner = PLANNERS.create("eplb", memory_factor=1.5, num_groups=4, num_nodes=2)
    assert isinstance(planner, EplbPlanner)


def test_before_any_load_slots_are_filled_in_index_order_over_and_over():
    plan = EplbPlanner().plan(request([1] * 4, [4] * 4))
    assert held(plan.replicas_ED) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert (plan.step, plan.layer, plan.release) == (7, 4, True)


def test_slots_are_the_memory_factor_rounded_up_to_whole_devices():
    sums = [
        EplbPlanner(memory_factor=factor).plan(request([1] * 10, [9] * 4)).replicas_ED.sum(axis=0)
        for factor in (1.0, 1.2, 1.21)
    ]
    assert [s.tolist() for s in sums] == [[3] * 4, [3] * 4, [4] * 4]


def test_a_memory_factor_is_not_rounded_up_by_binary_fractions():
    # 1.1 x 10 is 11.000000000000002 in binary.
    plan = EplbPlanner(memory_factor=1.1).plan(request([1] * 10, [10] * 11))
    assert plan.replicas_ED.sum() == 11


def test_a_re_plan_fills_the_slots_as_the_function_does():
    load = np.array([420.0, 390, 180, 120, 90, 60, 50, 40])
    plan = EplbPlanner().plan(request(load, [2] * 8))
    slots = rebalance_experts(load, num_slots=16, num_devices=8).reshape(8, 2)
    assert held(plan.replicas_ED) == [sorted(set(row)) for row in slots.tolist()]


def test_a_slot_that_repeats_its_device_s_expert_is_a_second_copy_there():
    plan = EplbPlanner().plan(request([800, 0, 0, 0, 0, 0, 0, 0], [2] * 8))
    assert plan.replicas_ED.dtype == np.uint8
    assert plan.replicas_ED.sum(axis=0).tolist() == [2] * 8
    assert sorted(plan.replicas_ED[0].tolist()) == [1] * 7 + [2]


def test_more_copies_than_a_plan_can_say_are_cut():
    load = np.zeros(512)
    load[3] = 1e6
    plan = EplbPlanner().plan(request(load, [512] * 2))
    assert plan.replicas_ED[3].tolist() == [255, 255]


def test_its_balance_is_that_of_even_shares_per_slot():
    plan = EplbPlanner().plan(request([500, 300, 10, 10, 10, 10, 10, 10], [2] * 8))
    load_D = expected_load_D(plan.load_E, plan.replicas_ED)
    assert load_D.mean() / load_D.max() == pytest.approx(0.717, abs=5e-4)


def test_without_any_load_the_plan_in_force_stays():
    previous = np.array([[2, 0], [0, 1], [0, 1]])
    plan = EplbPlanner().plan(request([0, 0, 0], [3, 3], previous))
    assert (plan.replicas_ED == previous).all()


def test_without_any_load_a_plan_that_no_longer_fits_is_replaced():
    previous = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 1]])
    plan = EplbPlanner(memory_factor=1.0).plan(request([0, 0, 0], [2, 0, 2], previous))
    assert held(plan.replicas_ED) == [[0, 1], [], [0, 2]]


def test_a_device_out_of_service_has_no_slots_and_nodes_are_ignored_then():
    planner = EplbPlanner(memory_factor=1.5, num_groups=2, num_nodes=2)
    plan = planner.plan(request([9, 7, 5, 3], [4, 4, 0, 4]))
    assert plan.replicas_ED.sum(axis=0).tolist() == [2, 2, 0, 2]


def test_groups_stay_on_their_node():
    planner = EplbPlanner(num_groups=2, num_nodes=2)
    plan = planner.plan(request([9, 7, 1, 1], [2] * 4))
    assert plan.replicas_ED[:2, 2:].sum() == 0
    assert plan.replicas_ED[2:, :2].sum() == 0


def test_the_smallest_device_bounds_the_slots_of_all():
    plan = EplbPlanner().plan(request([4, 3, 2, 1], [4, 2, 4]))
    assert plan.replicas_ED.sum(axis=0).tolist() == [2, 2, 2]


def test_slots_that_cannot_be_equal_are_reported_with_the_device():
    with pytest.raises(PlanError, match="device 1 holds 1 and 4 experts need 2; raise"):
        EplbPlanner().plan(request([4, 3, 2, 1], [4, 1]))


def test_too_few_slots_are_reported_with_the_numbers():
    with pytest.raises(PlanError, match="layer 4: 2 devices hold 3 replicas in all, 4 experts"):
        EplbPlanner().plan(request([1] * 4, [1, 2]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 2.0**54])
def test_an_impossible_load_is_refused_with_layer_and_expert(bad):
    with pytest.raises(PlanError, match="layer 4, expert 1"):
        EplbPlanner().plan(request([1.0, bad, 1.0], [3, 3]))
    with pytest.raises(PlanError, match="layer 1, expert 1"):
        rebalance_experts(np.array([[1.0, 1.0], [1.0, bad]]), num_slots=4, num_devices=2)


@pytest.mark.parametrize(
    ("slots", "devices", "groups", "nodes", "complaint"),
    [
        (12, 8, 1, 1, "12 slots on 8 devices"),
        (4, 4, 1, 1, "4 slots for 8 experts"),
        (12, 4, 3, 1, "8 experts in 3 groups"),
        (12, 4, 8, 8, "4 devices on 8 nodes"),
        (12, 0, 1, 1, "12 slots on 0 devices"),
        (12, 4, 1, 0, "1 groups on 0 nodes"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(slots, devices, groups, nodes, complaint):
    with pytest.raises(PlanError, match=complaint):
        rebalance_experts(
            np.ones(8),
            num_slots=slots,
            num_devices=devices,
            num_groups=groups,
            num_nodes=nodes,
        )


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 2, 3)])
def test_loads_of_another_shape_are_refused(shape):
    with pytest.raises(PlanError, match="expected"):
        rebalance_experts(np.ones(shape), num_slots=4, num_devices=2)


def test_loads_beyond_single_precision_are_told_apart():
    # In float32 both are 2^24, so that the original copies expert 0.
    load = np.array([2.0**24, 2.0**24 + 1])
    assert np.bincount(rebalance_experts(load, num_slots=3, num_devices=3)).tolist() == [1, 2]
    single = rebalance_experts(load, num_slots=3, num_devices=3, single_precision=True)
    assert np.bincount(single).tolist() == [2, 1]


@pytest.mark.parametrize(
    "options", [{"memory_factor": 0.9}, {"memory_factor": np.nan}, {"num_groups": 0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EplbPlanner(**options)
