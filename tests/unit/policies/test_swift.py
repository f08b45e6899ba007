import numpy as np
import pytest

from moeless.core.plan import PlanRequest
from moeless.errors import ConfigError, PlanError
from moeless.policies.planners import PLANNERS
from moeless.policies.planners.swift import SwiftPlanner
from moeless.policies.planners.swift_moves import relieve_hottest


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


def seats(*devices, experts):
    matrix = np.zeros((experts, len(devices)), dtype=np.uint8)
    for device, held in enumerate(devices):
        matrix[list(held), device] = 1
    return matrix


def held(matrix):
    return [np.flatnonzero(column).tolist() for column in matrix.T]


def test_the_registry_makes_it_with_its_options():
    planner = PLANNERS.create("swift", memory_factor=1.5, threshold=0.1, max_swaps=4)
    assert isinstance(planner, SwiftPlanner)


def test_before_any_load_slots_are_filled_in_index_order_over_and_over():
    plan = SwiftPlanner().plan(request([1] * 4, [4] * 4))
    assert held(plan.replicas_ED) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert (plan.step, plan.layer, plan.release) == (7, 4, True)


def test_without_any_load_the_plan_in_force_stays():
    previous = seats([0, 1], [1, 2], experts=3)
    plan = SwiftPlanner(memory_factor=4 / 3).plan(request([0, 0, 0], [3, 3], previous))
    assert (plan.replicas_ED == previous).all()


def test_a_hot_and_a_cold_expert_are_exchanged():
    # 100 against 20: exchanging 60 for 20 (or 40 for 0) leaves 60 against 60.
    previous = seats([0, 1], [2, 3], experts=4)
    plan = SwiftPlanner(memory_factor=1.0).plan(request([60, 40, 20, 0], [2, 2], previous))
    assert held(plan.replicas_ED) == [[1, 2], [0, 3]]


def test_a_hot_expert_s_copy_replaces_a_copy_that_is_not_needed():
    # Expert 2 has two replicas and no load; expert 0 takes one of its slots, one load in all.
    previous = seats([0, 2], [1, 2], experts=3)
    plan = SwiftPlanner(memory_factor=4 / 3).plan(request([90, 30, 0], [2, 2], previous))
    assert held(plan.replicas_ED) == [[0, 2], [0, 1]]


def test_a_share_that_is_too_large_to_move_is_split_and_room_made_for_it():
    # Device 0 carries 100, the others 60 each. A copy of expert 0 alone would give some device
    # 50 + 60; only with a second move do all get better.
    previous = seats([0, 7], [1, 2, 7], [3, 4, 7], experts=8)
    previous[[5, 6], [0, 0]] = 1
    load = [100, 30, 30, 30, 30, 0, 0, 0]
    plan = SwiftPlanner(memory_factor=10 / 8).plan(request(load, [4] * 3, previous))
    share = np.array(load) / plan.replicas_ED.sum(axis=1)
    assert (share @ plan.replicas_ED).max() <= 80


def test_a_gain_below_the_threshold_moves_nothing():
    previous = seats([0, 1], [2, 3], experts=4)
    hot = request([60, 40, 20, 0], [2, 2], previous)  # the best exchange gains 40%
    assert (SwiftPlanner(1.0, threshold=0.41).plan(hot).replicas_ED == previous).all()
    assert (SwiftPlanner(1.0, threshold=0.39).plan(hot).replicas_ED != previous).any()


def test_no_swaps_means_no_change():
    previous = seats([0, 1], [2, 3], experts=4)
    planner = SwiftPlanner(memory_factor=1.0, max_swaps=0)
    assert (planner.plan(request([60, 40, 20, 0], [2, 2], previous)).replicas_ED == previous).all()


def test_one_swap_loads_at_most_two_replicas():
    previous = seats([0, 1, 2], [3, 4, 5], experts=6)
    planner = SwiftPlanner(memory_factor=1.0, max_swaps=1)
    plan = planner.plan(request([50, 40, 30, 3, 2, 1], [3, 3], previous))
    assert ((plan.replicas_ED > 0) & (previous == 0)).sum() == 2


def test_a_lost_device_s_experts_are_seated_in_place_of_copies():
    previous = seats([0, 1], [1, 2], [3, 2], experts=4)
    planner = SwiftPlanner(memory_factor=1.0)
    plan = planner.plan(request([1, 1, 1, 9], [2, 2, 0], previous))
    assert plan.replicas_ED.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert plan.replicas_ED.sum(axis=0).tolist() == [2, 2, 0]


def test_a_device_that_comes_back_is_used():
    previous = seats([0, 1], [1, 2], [], experts=3)
    plan = SwiftPlanner().plan(request([30, 20, 10], [2, 2, 2], previous))
    assert plan.replicas_ED.sum(axis=0).tolist() == [2, 2, 2]


def test_devices_that_shrank_keep_one_replica_of_every_expert():
    previous = seats([0, 1, 2], [0, 1, 2], experts=3)
    plan = SwiftPlanner().plan(request([5, 1, 3], [2, 2], previous))
    assert plan.replicas_ED.sum(axis=0).tolist() == [2, 2]
    assert (plan.replicas_ED.sum(axis=1) >= 1).all()


def test_moves_never_leave_the_best_placement_on_the_way():
    load = np.array([100.0, 1, 1, 1])
    start = seats([0, 1], [2, 3], experts=4) > 0
    assert (relieve_hottest(load, start, max_swaps=50) == start).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 2.0**54])
def test_an_impossible_load_is_refused_with_layer_and_expert(bad):
    with pytest.raises(PlanError, match="layer 4, expert 1"):
        SwiftPlanner().plan(request([1.0, bad, 1.0], [3, 3]))


def test_slots_that_cannot_be_equal_are_reported_with_the_device():
    with pytest.raises(PlanError, match="swift gives each of 2 devices equally many slots"):
        SwiftPlanner().plan(request([4, 3, 2, 1], [4, 1]))


@pytest.mark.parametrize(
    "options",
    [
        {"memory_factor": 0.9},
        {"threshold": -0.1},
        {"threshold": 1.0},
        {"threshold": np.nan},
        {"max_swaps": -1},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SwiftPlanner(**options)
