"""Figures from recordings made by hand."""

import numpy as np
import pytest

from moeless.core.layer_cost import LayerCost
from moeless.simulator.metrics import (
    MetricsConfig,
    bound_s_SL,
    count_idle_layer_steps,
    measure_policy,
    straggler_ratio_SL,
)
from moeless.simulator.recording import Recording, num_warm_up_steps

COST = LayerCost(base_s=1.0, touch_s=0.5, token_s=0.25, transfer_s=0.125)


def config(**changes):
    return MetricsConfig(
        **{
            "cost": COST,
            "num_devices": 2,
            "device_bytes": 10**9,
            "function_bytes": 2 * 10**9,
            "serverless": True,
            **changes,
        }
    )


def make_recording(steps, layers=1, experts=2, devices=2):
    recording = Recording.empty(
        steps=steps, layers=layers, experts=experts, devices=devices, keep_replicas=False
    )
    recording.start_s_S = np.arange(steps, dtype=float)
    recording.end_s = float(steps)
    recording.resident_gb_s_S = np.arange(steps + 1, dtype=float)
    return recording


def test_the_straggler_ratio_is_over_the_least_that_whole_tokens_allow():
    tokens_SLD = np.array([[[4, 3]], [[7, 0]], [[0, 0]]])
    ratio_SL = straggler_ratio_SL(tokens_SLD, np.array([[7], [7], [0]]))
    assert ratio_SL[:2].tolist() == [[1.0], [7 / 4]]
    assert np.isnan(ratio_SL[2, 0])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_bounds_of_all_layer_steps_are_those_of_the_cost_model(devices):
    rng = np.random.default_rng(0)
    loads_SLE = rng.integers(0, 9, size=(30, 2, 5)) * rng.integers(0, 2, size=(30, 2, 5))
    bound_SL = bound_s_SL(loads_SLE, cost=COST, num_devices=devices)
    for index in np.ndindex(bound_SL.shape):
        assert bound_SL[index] == pytest.approx(COST.bound_s(loads_SLE[index], devices))


def test_the_first_tenth_of_the_steps_is_warm_up():
    assert [num_warm_up_steps(n) for n in (1, 9, 10, 19, 20, 3464)] == [0, 0, 1, 1, 2, 346]


def test_warm_up_and_layer_steps_without_tokens_are_left_out():
    recording = make_recording(10)
    loads_SLE = np.full((10, 1, 2), 3)
    loads_SLE[4] = 0
    recording.device_tokens_SLD[:] = 3
    recording.device_tokens_SLD[0] = [[6, 0]]
    recording.device_tokens_SLD[4] = 0
    recording.warm_SL[:] = 3
    recording.warm_SL[0], recording.warm_SL[4] = 50, 60
    recording.layer_s_SL[:] = 4.0
    recording.layer_s_SL[0] = 100.0
    recording.layer_s_SL[4] = 0.0
    recording.cold_SL[:3] = 1
    recording.blocking_SL[2] = 1
    figures = measure_policy(recording, loads_SLE, config=config())
    assert figures["straggler_ratio"] == {"mean": 1.0, "p50": 1.0, "p99": 1.0, "max": 1.0}
    assert figures["layer_forward_ms"]["max"] == 4000.0
    # base + 2 experts' weights over 2 devices + 3 tokens + their way there and back
    assert figures["bound_ratio"]["mean"] == pytest.approx(4.0 / (1.0 + 0.5 + 0.75 + 0.75))
    assert figures["memory_factor"] == 1.5
    assert figures["replicas_per_layer"] == {"mean": 3.0, "max": 3}
    assert figures["cold_starts_per_layer_step"] == 2 / 8
    assert figures["blocking_loads_per_layer_step"] == 1 / 8
    assert count_idle_layer_steps(loads_SLE) == 1


def test_the_four_accountings():
    recording = make_recording(10, layers=2)
    recording.busy_s_SL[:] = 0.5
    recording.layer_s_SL[:] = 2.0
    recording.warm_SL[:, 0], recording.warm_SL[:, 1] = 3, 4
    loads_SLE = np.ones((10, 2, 2), dtype=int)
    gb_s = measure_policy(recording, loads_SLE, config=config())["gb_s"]
    assert gb_s["billed"] == pytest.approx(9 * 2 * 0.5 * 2)
    assert gb_s["resident"] == pytest.approx(9.0)
    assert gb_s["reserved"] == pytest.approx(9.0 * 2 * 1)
    assert gb_s["paper"] == pytest.approx(9 * 2.0 * (3 + 4) * 2)
    serverful = measure_policy(recording, loads_SLE, config=config(serverless=False))["gb_s"]
    assert serverful["paper"] == pytest.approx(9 * 2 * 2.0 * 7 * 2)
    assert {k: v for k, v in serverful.items() if k != "paper"} == {
        k: v for k, v in gb_s.items() if k != "paper"
    }
    with_misc = measure_policy(recording, loads_SLE, config=config(misc_bytes=10**9))["gb_s"]
    assert with_misc["paper"] == pytest.approx(gb_s["paper"] + 9 * 2 * 2.0 * 1)


def test_a_trace_without_any_tokens_has_figures_of_zero():
    recording = make_recording(3)
    figures = measure_policy(recording, np.zeros((3, 1, 2), dtype=int), config=config())
    assert figures["straggler_ratio"]["mean"] == 0.0
    assert figures["cold_starts_per_layer_step"] == 0.0
    assert figures["memory_factor"] == 0.0


def test_timings_are_microseconds():
    recording = make_recording(1)
    recording.plan_s = np.array([1e-6, 3e-6])
    recording.split_s = np.array([2e-6])
    recording.search_s = np.array([5e-3])
    figures = measure_policy(recording, np.ones((1, 1, 2), dtype=int), config=config())
    assert figures["plan_us"]["p50"] == pytest.approx(2.0)
    assert figures["split_us"]["p99"] == pytest.approx(2.0)
    assert figures["search"]["count"] == 1
    assert figures["search"]["p50_us"] == pytest.approx(5000.0)


def test_a_recording_survives_its_file(tmp_path):
    recording = make_recording(4)
    recording.cold_SL[2, 0] = 9
    recording.explanation = {"why": ["because"]}
    recording.failed_plans = 2
    recording.save(tmp_path / "r.npz")
    found = Recording.load(tmp_path / "r.npz")
    assert found.cold_SL.tolist() == recording.cold_SL.tolist()
    assert (found.end_s, found.failed_plans) == (4.0, 2)
    assert found.explanation == {"why": ["because"]}
    assert found.replicas_SLED is None
