"""Placements planned from loads: what is promised holds for every policy."""

import numpy as np
import pytest

from moeless.bootstrap.placements.explain_placement import explain_layer
from moeless.bootstrap.placements.placement import plan_placement, slots_per_device
from moeless.bootstrap.placements.placement_plan import PlacementTask
from moeless.errors import ConfigError
from moeless.policies.planners import PLANNERS
from moeless.workloads.formats.expert_loads import ExpertLoads
from moeless.workloads.formats.placements.placement import slot_rows

BUILT_IN = [
    name for name in PLANNERS.names() if name in ("eplb", "moeless", "paper", "static", "swift")
]
SKEWED = [[800, 0, 0, 0, 0, 0, 0, 0], [420, 390, 180, 120, 90, 60, 50, 40]]


def task(loads, *, policy="eplb", devices=8, **options):
    array = np.asarray(loads)
    expert_loads = ExpertLoads(
        loads_LE=array, layer_ids=tuple(range(len(array))), source="test", steps=1
    )
    return PlacementTask(loads=expert_loads, num_devices=devices, policy=policy, **options)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_no_loads_copy_nothing(policy):
    planned = plan_placement(task(np.zeros((2, 8), int), policy=policy, slots=16))
    assert planned.copies == 0
    assert [layer.even for layer in planned.layers] == [None, None]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_experts_that_the_devices_do_not_divide_need_no_arithmetic(policy):
    loads = np.arange(1, 41).reshape(4, 10)
    planned = plan_placement(task(loads, policy=policy, devices=3))
    placed = planned.placement.replicas_LED
    assert placed.any(axis=2).all()
    assert (placed.sum(axis=1) <= planned.capacity_D).all()


@pytest.mark.parametrize("policy", [p for p in BUILT_IN if p != "static"])
def test_replication_beats_the_static_placement(policy):
    planned = plan_placement(task(SKEWED, policy=policy, slots=16))
    for layer in planned.layers:
        assert layer.min_time >= layer.even - 1e-9
        assert layer.min_time > layer.static
        assert layer.copies > 0


def test_figures_of_static_expert_parallelism_are_mean_over_max():
    planned = plan_placement(task(SKEWED, policy="static", slots=8))
    assert [layer.static for layer in planned.layers] == pytest.approx([1 / 8, 1350 / 8 / 420])
    assert planned.copies == 0


def test_bytes_to_copy_are_counted_against_the_placement_in_force():
    first = plan_placement(task(SKEWED, slots=16, expert_bytes=10))
    assert first.copy_bytes(first.copies) == 10 * first.copies > 0
    again = plan_placement(task(SKEWED, slots=16, expert_bytes=10, current=first.placement))
    assert again.copies == 0
    assert plan_placement(task(SKEWED, slots=16)).copy_bytes(3) is None


def test_slots_that_the_devices_do_not_divide_are_spread():
    assert slots_per_device(task(SKEWED, policy="moeless", slots=12)).tolist() == [2] * 4 + [1] * 4


@pytest.mark.parametrize("policy", ["eplb", "swift"])
def test_policies_with_equal_slots_say_so(policy):
    with pytest.raises(ConfigError, match=r"8 devices do not divide 12; use --slots 16"):
        plan_placement(task(SKEWED, policy=policy, slots=12))


def test_device_memory_is_divided_among_the_layers():
    memory = task(SKEWED, device_memory_bytes=65, expert_bytes=10)
    assert slots_per_device(memory).tolist() == [3] * 8


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slots": 7}, "7 slots per layer, but each of 8 experts needs one"),
        ({"device_memory_bytes": 15, "expert_bytes": 10}, "--device-memory of at least"),
        ({"device_memory_bytes": 15}, "--expert-bytes or --model"),
        ({"slots": 16, "device_memory_bytes": 15}, "give one of them"),
        ({"policy": "nonsense"}, "unknown planner 'nonsense'; known are"),
    ],
)
def test_what_cannot_be_planned_says_what_to_change(options, match):
    with pytest.raises(ConfigError, match=match):
        plan_placement(task(SKEWED, **options))


def test_a_placement_in_force_of_another_model_is_refused():
    other = plan_placement(task([[1, 2, 3, 4]], devices=8, slots=8)).placement
    with pytest.raises(ConfigError, match="--current has 4 experts on 8 devices"):
        plan_placement(task(SKEWED, slots=16, current=other))


@pytest.mark.parametrize("policy", [p for p in BUILT_IN if p not in ("static",)])
def test_equal_slots_are_filled_for_systems_that_need_them(policy):
    planned = plan_placement(task(SKEWED, policy=policy, slots=16, equal_slots=True))
    widths = {len(row) for row in slot_rows(planned.placement, system="test")}
    assert widths == {16}
    assert planned.placement.replicas_LED.max() == 1


def test_filling_never_makes_an_even_split_worse_than_the_best_of_its_choices():
    planned = plan_placement(
        task([[9, 9, 1, 1], [5, 5, 5, 5]], policy="paper", devices=2, slots=6, equal_slots=True)
    )
    assert all(layer.even == pytest.approx(1.0, abs=0.1) for layer in planned.layers)


def test_equal_slots_cannot_be_filled_beyond_a_devices_capacity():
    with pytest.raises(ConfigError, match="same number of slots on every device"):
        plan_placement(task(SKEWED, policy="paper", slots=12, equal_slots=True))


def test_fractional_loads_are_not_rounded_away():
    planned = plan_placement(task([[0.4, 0.3, 0.2, 0.1]], devices=4, slots=8))
    assert planned.layers[0].static == pytest.approx(0.625)


def test_every_expert_is_explained():
    planned = plan_placement(task(SKEWED, slots=16))
    hot, *rest = explain_layer(planned, planned.layers[0])
    assert hot.share == 8.0
    assert hot.limit == "it is on every device already"
    assert "one device alone would carry 8.00 x the mean device load" in hot.why
    assert all("no tokens came" in reason.why for reason in rest)


def test_an_explanation_says_what_the_next_replica_would_gain_and_what_limits_it():
    planned = plan_placement(task([[4, 1, 1, 1]], policy="static", devices=4, slots=8))
    reasons = explain_layer(planned, planned.layers[0])
    assert reasons[0].next_gain == pytest.approx(0.25)
    assert reasons[0].next_device == 1
    assert "take 25.0% off the hottest device; static expert parallelism never" in reasons[0].limit
    assert reasons[1].limit == "one more would take nothing off the hottest device (0)"
    full = plan_placement(task([[4, 1, 1, 1]], policy="static", devices=4, slots=4))
    limit = explain_layer(full, full.layers[0])[0].limit
    assert "no device without it has a free slot (4 of 4 in use)" in limit
