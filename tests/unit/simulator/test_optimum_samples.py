"""Sampled layer-steps and the optimum over their replicas."""

import numpy as np
import pytest

from fakes.replays import COST, draw_trace, make_trace, run
from moeless.core.layer_cost import LayerCost
from moeless.simulator.optimum import least_tokens
from moeless.simulator.optimum_samples import (
    compare_with_optimum,
    sample_layer_steps,
    solve_samples,
)
from moeless.simulator.recording import Recording


def make_recording(samples, replicas_NED, layer_s):
    recording = Recording.empty(
        steps=3, layers=1, experts=2, devices=2, keep_replicas=False, samples=samples
    )
    recording.sample_NED[:] = replicas_NED
    recording.layer_s_SL[:, 0] = layer_s
    return recording


def test_samples_are_busy_layer_steps_after_the_warm_up_each_at_most_once():
    loads = draw_trace(steps=40, layers=3).loads_NLE.copy()
    loads[10:20, 1] = 0
    samples = sample_layer_steps(loads, 50, seed=1)
    assert len(set(samples)) == 50
    assert list(samples) == sorted(samples)
    assert all(step >= 4 and loads[step, layer].any() for step, layer in samples)
    assert samples == sample_layer_steps(loads, 50, seed=1)
    assert samples != sample_layer_steps(loads, 50, seed=2)


def test_there_are_no_more_samples_than_busy_layer_steps():
    loads = np.zeros((20, 2, 4), dtype=np.uint32)
    assert sample_layer_steps(loads, 5, seed=0) == ()
    loads[1, 0, 0] = 3  # warm-up
    loads[7, 1, 2] = 1
    assert sample_layer_steps(loads, 5, seed=0) == ((7, 1),)


def test_a_replay_keeps_the_replicas_of_its_samples_and_survives_its_file(tmp_path):
    trace = draw_trace(steps=30, layers=3)
    samples = sample_layer_steps(trace.loads_NLE, 12, seed=0)
    recording = run(trace, "moeless", samples=samples)
    assert (recording.sample_N2 == samples).all()
    for (step, layer), sample_ED in zip(samples, recording.sample_NED, strict=True):
        assert (sample_ED == recording.replicas_SLED[step, layer]).all()
    recording.optimum_s_N = solve_samples(recording, trace.loads_NLE, COST)
    recording.save(tmp_path / "recording.npz")
    again = Recording.load(tmp_path / "recording.npz")
    assert (again.optimum_s_N == recording.optimum_s_N).all()
    assert (again.sample_NED == recording.sample_NED).all()


def test_the_default_policy_reaches_the_optimum_and_an_even_split_does_not():
    trace = draw_trace(steps=40, layers=3, tokens=400)
    samples = sample_layer_steps(trace.loads_NLE, 30, seed=0)
    ratio = {}
    for name in ("moeless", "paper"):
        recording = run(trace, name, samples=samples)
        recording.optimum_s_N = solve_samples(recording, trace.loads_NLE, COST)
        found = compare_with_optimum(recording)
        assert found["samples"] == 30
        assert found["solved"] + found["waited"] == 30
        assert found["timed_out"] == 0
        ratio[name] = found["ratio"]
    assert ratio["moeless"]["max"] == pytest.approx(1.0)
    assert ratio["paper"]["mean"] > 1.01


def test_ratios_are_of_the_time_that_the_layer_took():
    replicas = [[[1, 1], [0, 1]], [[1, 0], [0, 1]]]
    loads = make_trace([[[6, 2]], [[6, 2]], [[6, 2]]]).loads_NLE
    recording = make_recording([(1, 0), (2, 0)], replicas, [9.0, 5.0, 12.0])
    recording.optimum_s_N = solve_samples(recording, loads, LayerCost(token_s=1.0))
    assert recording.optimum_s_N.tolist() == [4.0, 6.0]
    found = compare_with_optimum(recording)
    assert found["ratio"]["mean"] == pytest.approx((5 / 4 + 2) / 2)
    assert found["ratio"]["max"] == pytest.approx(2.0)


def test_samples_whose_tokens_waited_are_counted_apart_and_left_out():
    replicas = [[[1, 1], [0, 0]], [[1, 0], [0, 1]]]
    loads = make_trace([[[6, 2]], [[6, 2]], [[6, 2]]]).loads_NLE
    recording = make_recording([(1, 0), (2, 0)], replicas, [9.0, 50.0, 6.0])
    recording.optimum_s_N = solve_samples(recording, loads, LayerCost(token_s=1.0))
    found = compare_with_optimum(recording)
    assert (found["samples"], found["solved"], found["waited"]) == (2, 1, 1)
    assert found["ratio"]["max"] == 1.0


def test_samples_that_are_not_solved_in_time_are_counted_apart_and_left_out():
    rng = np.random.default_rng(0)
    loads = rng.integers(50, 5000, size=(1, 1, 40))
    recording = Recording.empty(
        steps=1, layers=1, experts=40, devices=8, keep_replicas=False, samples=[(0, 0)]
    )
    recording.sample_NED[:] = 1
    cost = LayerCost(token_s=1.0, touch_s=50.0)
    recording.optimum_s_N = solve_samples(recording, loads, cost, limit_s=0.0)
    found = compare_with_optimum(recording)
    assert (found["samples"], found["solved"], found["timed_out"]) == (1, 0, 1)
    assert found["ratio"] is None


def test_without_samples_there_is_nothing_to_compare():
    assert compare_with_optimum(run(draw_trace(steps=10), "static")) is None


def test_every_sampled_optimum_is_a_time_of_whole_tokens():
    trace = draw_trace(steps=20, layers=2)
    samples = sample_layer_steps(trace.loads_NLE, 10, seed=0)
    recording = run(trace, "static", samples=samples)
    found_s = solve_samples(recording, trace.loads_NLE, COST)
    for n, (step, layer) in enumerate(samples):
        most = least_tokens(trace.loads_NLE[step, layer].astype(int), recording.sample_NED[n])
        assert found_s[n] == pytest.approx(most * (COST.token_s + 2 * COST.transfer_s))
