"""Algorithms 1 and 2 of the MoEless paper on cases small enough to follow by hand."""

import numpy as np

from moeless.core.plan import PlanRequest
from moeless.policies.planners.paper import PaperPlanner
from moeless.policies.planners.paper_placer import place_replicas
from moeless.policies.planners.paper_scaler import scale_replicas


def rows(placed, devices):
    return [list(placed[i : i + devices]) for i in range(0, len(placed), devices)]


def test_algorithm_1_splits_the_hottest_expert_until_the_loads_are_even():
    # Loads                       mean   std     CV
    # 80 20 20 20                 35     25.98   0.74   split expert 0
    # 40 40 20 20 20              28     9.80    0.35   split expert 0
    # 26.7 26.7 26.7 20 20 20     23.3   3.33    0.14   balanced
    counts = scale_replicas([80, 20, 20, 20], cv_threshold=0.2, max_replicas=8, max_per_expert=4)
    assert counts == [3, 1, 1, 1]


def test_algorithm_1_counts_experts_without_load():
    # 60 0 -> 30 30 0 -> 20 20 20 0: CV 1.0, 0.71, 0.58. It falls for ever but never to 0.2, so
    # the cap of four replicas ends it.
    assert scale_replicas([60, 0], cv_threshold=0.2, max_replicas=4, max_per_expert=8) == [3, 1]


def test_algorithm_1_stops_at_the_memory_cap():
    counts = scale_replicas([80, 20, 20, 20], cv_threshold=0.2, max_replicas=5, max_per_expert=4)
    assert counts == [2, 1, 1, 1]


def test_algorithm_1_passes_over_an_expert_that_is_on_every_device():
    # 90 40 5 -> 45 45 40 5 (CV 0.49); expert 0 is on both devices, so expert 1 is next:
    # 45 45 20 20 5 (CV 0.58); expert 1 is on both as well, expert 2 is all that is left:
    # 45 45 20 20 2.5 2.5 (CV 0.77).
    counts = scale_replicas([90, 40, 5], cv_threshold=0.2, max_replicas=6, max_per_expert=2)
    assert counts == [2, 2, 2]


def test_algorithm_1_breaks_ties_by_the_lowest_expert():
    # 30 30 0 0: CV 1.0. Expert 0 first, then expert 1 (30 > 15), then the cap
    # of six replicas; a cap of five stops before expert 1.
    capped = {
        cap: scale_replicas([30, 30, 0, 0], cv_threshold=0.2, max_replicas=cap, max_per_expert=4)
        for cap in (5, 6)
    }
    assert capped == {5: [2, 1, 1, 1], 6: [2, 2, 1, 1]}


def test_algorithm_2_joins_the_shortest_queue():
    # Replica loads 40 30 20 10 on two devices, nothing warm:
    # 40 -> device 0 (tie), 30 -> device 1, 20 -> device 1 (30 < 40), 10 -> device 0 (40 < 50).
    placed = place_replicas([40, 30, 20, 10], [1, 1, 1, 1], alive=[[0, 0]] * 4, capacity=[4, 4])
    assert rows(placed, 2) == [[1, 0], [0, 1], [0, 1], [1, 0]]


def test_algorithm_2_reuses_a_warm_replica_whatever_its_device_carries():
    # Experts 0 and 1 are warm on device 0 only, so both stay there although device 1 is idle:
    # the behaviour as printed. Expert 2 is warm nowhere and joins the shortest queue.
    placed = place_replicas(
        [40, 30, 20], [1, 1, 1], alive=[[1, 0], [1, 0], [0, 0]], capacity=[3, 3]
    )
    assert rows(placed, 2) == [[1, 0], [1, 0], [0, 1]]


def test_algorithm_2_reuses_the_warm_replica_on_the_least_loaded_device():
    # Expert 0 (40) takes device 0 by index; expert 1 is warm on devices 0 and 1 and takes 1.
    placed = place_replicas([40, 30], [1, 1], alive=[[1, 0], [1, 1]], capacity=[2, 2])
    assert rows(placed, 2) == [[1, 0], [0, 1]]


def test_twelve_equal_replicas_leave_four_of_eight_devices_with_double_load():
    # Eight experts on eight devices, four of them twice as hot: Algorithm 1 gives those two
    # replicas each and is content (twelve equal replicas, CV 0), Algorithm 2 seats twelve on
    # eight devices. Replicas are even, devices are not: max / mean = 2 / 1.5.
    load = np.array([20.0, 20, 20, 20, 10, 10, 10, 10])
    none = np.zeros((8, 8), dtype=np.uint8)
    plan = PaperPlanner().plan(
        PlanRequest(
            step=0,
            layer=0,
            load_E=load,
            previous_ED=none,
            alive_ED=none,
            capacity_D=np.full(8, 2, dtype=np.int64),
        )
    )
    assert plan.replicas_ED.sum(axis=1).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    share_E = load / plan.replicas_ED.sum(axis=1)
    assert (share_E @ plan.replicas_ED).tolist() == [20, 20, 20, 20, 10, 10, 10, 10]
