import numpy as np
import pytest

pytest.importorskip("torch")

from moeless.config import PolicyConfig
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.costs.time_models import build_time_model
from moeless.workloads.arrivals import Arrivals
from moeless_experiments.measured.calibration import (
    Measured,
    draw_steps,
    fit_devices,
    fit_linear,
    write_linear,
)
from moeless_experiments.measured.emulation import DeviceEmulator, static_shares
from moeless_experiments.measured.intervals import bootstrap_ratio
from moeless_experiments.measured.layer_shape import DEMO, LAYERS, LayerShape, save_random
from moeless_experiments.measured.layer_tables import (
    Times,
    error_finding,
    ratio_findings,
    time_plots,
    time_tables,
)
from moeless_experiments.measured.replaying import KeepingSplitter, replay_shares
from moeless_experiments.measured.workers import LayerRunner, one_thread, start_workers
from moeless_experiments.measured.workload import Workload, busiest, lay_out, scale

TINY = LayerShape(name="tiny", hidden=64, intermediate=32, experts=8, top_k=2)


def make_workload(steps=6, tokens=24):
    ids = draw_steps([tokens] * steps, TINY.experts, TINY.top_k, skew=1.0, drift=0.2, seed=1)
    return Workload(name="tiny", shape=TINY, ids=tuple(ids), source="made up")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return save_random(TINY, tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.mark.parametrize("counts", [[4, 4, 0, 0], [1, 2, 3, 2], [4, 3, 1, 0]])
def test_tokens_laid_out_from_counts_have_no_expert_twice(counts):
    count_E = np.array(counts)
    ids_TK = lay_out(count_E, top_k=2)
    assert ids_TK.shape == (4, 2)
    assert np.bincount(ids_TK.ravel(), minlength=4).tolist() == counts
    assert all(len(set(row)) == 2 for row in ids_TK.tolist())


@pytest.mark.parametrize("total", [1, 7, 256])
def test_scaled_counts_keep_their_proportions_and_have_the_sum_wanted(total):
    count_E = np.array([700, 200, 99, 1, 0])
    scaled_E = scale(count_E, total)
    assert scaled_E.sum() == total
    assert np.abs(scaled_E - count_E * total / 1000).max() < 1
    assert scaled_E[-1] == 0


def test_the_busiest_part_is_where_most_requests_came():
    time_s_R = np.array([0.0, 50.0, 51.0, 52.0, 100.0])
    counts_R = np.arange(5)
    arrivals = Arrivals(time_s_R=time_s_R, prompt_tokens_R=counts_R, generated_tokens_R=counts_R)
    part = busiest(arrivals, 10.0)
    assert part.time_s_R.tolist() == [0.0, 1.0, 2.0]
    assert part.prompt_tokens_R.tolist() == [1, 2, 3]


def test_the_interval_of_a_ratio_holds_it_and_shrinks_with_certainty():
    rng = np.random.default_rng(0)
    other_A = 1 + 0.1 * rng.standard_normal(12)
    noisy = bootstrap_ratio(0.8 + 0.1 * rng.standard_normal(12), other_A, seed=1)
    exact = bootstrap_ratio(0.8 * other_A, other_A, seed=1)
    assert noisy.low < noisy.value < noisy.high
    assert exact.value == pytest.approx(0.8)
    assert exact.high - exact.low < 1e-12
    assert exact.as_change() == "-20.0% [-20.0, -20.0]"


def test_shares_of_a_layer_that_is_split_in_rounds_are_added_up():
    class FirstReplica:
        def split(self, count_E, replicas_ED):
            return count_E[:, None] * np.array([[1, 0]])

    splitter = KeepingSplitter(FirstReplica(), np.array([[5, 3]]))
    replicas_ED = np.ones((2, 2), dtype=np.uint8)
    for counts in ([2, 0], [0, 3], [1, 2]):
        splitter.split(np.array(counts), replicas_ED)
    assert [share.sum() for share in splitter.shares] == [5, 3]


@pytest.mark.parametrize("policy", ["static", "eplb", "paper", "moeless"])
def test_a_replay_says_who_computes_each_token(policy):
    trace = make_workload().as_trace()
    replayed = replay_shares(
        trace,
        policy,
        devices=4,
        cost=LayerCost(base_s=1e-4, touch_s=1e-5, token_s=1e-6),
        expert=ExpertShape(hidden=64, intermediate=32),
        seed=0,
    )
    np.testing.assert_array_equal(replayed.share_SLED.sum(axis=3), trace.loads_NLE)
    assert (replayed.layer_s_SL > 0).all()


def test_every_device_is_emulated_and_the_slowest_counts(loaded):
    steps = list(make_workload().ids)
    emulator = DeviceEmulator(loaded, seed=0)
    with one_thread():
        sample = emulator.run_best(0, steps[0][0], static_shares(steps, 8, 4)[0][0], 2)
    assert (sample.busy_s_D > 0).all()
    assert sample.seconds == sample.busy_s_D.max()
    assert sample.share_ED.sum() == steps[0].shape[1] * TINY.top_k


def test_fits_find_the_coefficients_that_times_were_made_from(tmp_path):
    rng = np.random.default_rng(0)
    tokens_ND = rng.integers(1, 200, size=(60, 2))
    touched_ND = rng.integers(1, 5, size=(60, 2))
    busy_ND = 3e-4 + 2e-5 * touched_ND + 4e-6 * tokens_ND
    measured = Measured(
        batch_N=tokens_ND.sum(axis=1),
        seconds_N=busy_ND.max(axis=1) + 2 * 1e-7 * tokens_ND.max(axis=1),
        busy_ND=busy_ND,
        tokens_ND=tokens_ND,
        touched_ND=touched_ND,
    )
    devices, linear = fit_devices([measured]), fit_linear(measured)
    for found in (devices, linear):
        assert found.base_s == pytest.approx(3e-4, rel=0.02)
        assert found.token_s == pytest.approx(4e-6, rel=0.05)
    write_linear(linear, tmp_path / "cost.json", "made up")
    expert = ExpertShape(hidden=64, intermediate=32)
    assert build_time_model(str(tmp_path / "cost.json"), expert, 2).cost == linear


def test_workers_compute_every_token_of_recorded_choices(loaded):
    workload = make_workload(steps=3)
    policy = PolicyConfig(policy="moeless", memory_factor=1.5)
    with start_workers(loaded, policy) as runtime, one_thread():
        runner = LayerRunner(runtime, seed=0)
        runner.heed([loads_LE.astype(float) for loads_LE in workload.as_trace().loads_NLE])
        samples = [runner.run(step, ids_LTK) for step, ids_LTK in enumerate(workload.ids)]
    for step, ids_LTK in zip(samples, workload.ids, strict=True):
        assert len(step) == LAYERS
        for sample, ids_TK in zip(step, ids_LTK, strict=True):
            counts = np.bincount(ids_TK.ravel(), minlength=TINY.experts)
            np.testing.assert_array_equal(sample.share_ED.sum(axis=1), counts)
            assert sample.seconds > sample.busy_s_D.max() > 0


def make_times():
    rng = np.random.default_rng(3)
    speeds = {"static": 1.0, "eplb": 0.9, "paper": 1.1, "moeless": 0.8}
    seconds = {name: speed * rng.uniform(0.9, 1.1, (10, 3, 2)) for name, speed in speeds.items()}
    return Times(
        name="tiny",
        seconds=seconds,
        computing={name: 0.5 * value for name, value in seconds.items()},
        simulated={name: 1.1 * value for name, value in seconds.items()},
        counted={name: np.ones((10, 3, 2), dtype=bool) for name in speeds},
        straggler=dict.fromkeys(speeds, 1.25),
    )


def test_tables_and_findings_say_what_times_say():
    times = [make_times()]
    tables = {table.name: table for table in time_tables(times, seed=0)}
    assert len(tables["layer_times"].rows) == 4
    assert tables["simulator_error"].column("median_error") == pytest.approx([0.1] * 4)
    assert len(tables["ratios"].rows) == 6
    static, eplb, paper = ratio_findings(times, seed=0, intervals="steps", why="Because.")
    assert static.paper == "-43.19%"
    assert static.verdict == "does not hold"
    assert static.ours.endswith("1 faster and 0 slower beyond doubt")
    assert static.cases["tiny"].startswith(("-20", "-19"))
    assert "20.0%" in static.why  # of 1.25, perfect balance takes a fifth
    assert eplb.paper == "-21.89%"
    assert paper.paper == "not in our copy"
    error = error_finding(times, "measured")
    assert error.ours == "at most +10.0%"
    assert "+10.0 to +10.0%" in error.cases["tiny"]


def test_plots_of_times_can_be_drawn():
    figure = pytest.importorskip("matplotlib.figure")
    for plot in time_plots([make_times()] * 3, "measured"):
        canvas = figure.Figure(figsize=plot.inches)
        plot.draw(canvas)
        assert canvas.axes
        assert plot.caption


def test_the_demo_shape_is_the_demo_models():
    assert (DEMO.hidden, DEMO.intermediate, DEMO.experts, DEMO.top_k) == (576, 48, 16, 8)
