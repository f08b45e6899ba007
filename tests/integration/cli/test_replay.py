"""The command ``moeless replay``, from the command line to its files."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from effort import PATIENCE_S
from fakes.replays import draw_trace, make_trace
from moeless.cli.main import run
from moeless.workloads.routing_trace import write_trace

POLICIES = "static,eplb,swift,paper,moeless,oracle"
MEASURED = ("plan_us", "split_us", "search")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A trace of steps whose model is not known."""
    path = tmp_path_factory.mktemp("traces") / "steps.npz"
    write_trace(draw_trace(steps=50, layers=3, experts=8, top_k=2), path)
    return path


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "requests.npz"
    write_trace(draw_trace(steps=20, layers=2, unit="requests", model="org/Mixtral-8x7B"), path)
    return path


@pytest.fixture(scope="module")
def arrivals(tmp_path_factory):
    path = tmp_path_factory.mktemp("arrivals") / "azure.csv"
    lines = [f"2023-11-16 18:15:{s // 2:02d}.{s % 2 * 5}00000,100,{3 + s % 4}" for s in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return path


def replay(*arguments, code=0):
    assert run(["replay", *(str(argument) for argument in arguments)]) == code


@pytest.fixture
def fails(capfd):
    """Run a replay that must fail; returns the one line that it printed."""

    def check(*arguments, code=2):
        capfd.readouterr()
        replay(*arguments, code=code)
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("moeless: error: ")
        return lines[0]

    return check


@pytest.fixture(scope="module")
def everything(steps, tmp_path_factory):
    """All policies on the trace of steps, twice with the same seed."""
    folder = tmp_path_factory.mktemp("out")
    for number, jobs in ((1, 2), (2, 1)):
        replay(
            *("--routing", steps, "--expert-shape", "64x64", "--devices", 4),
            *("--policies", POLICIES, "--prediction", "noisy:0.12", "--seed", 5),
            *("--json", folder / f"{number}.json", "--dump", folder / f"{number}.npz"),
            *("--eplb-interval", 20, "--swift-interval", 10, "--jobs", jobs),
        )
    return folder


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_figures_have_the_documented_shape(everything):
    report = load(everything / "1.json")
    assert list(report["policies"]) == POLICIES.split(",")
    summary = {"mean", "p50", "p99", "max"}
    for figures in report["policies"].values():
        for name in ("straggler_ratio", "layer_forward_ms", "bound_ratio"):
            assert figures[name].keys() == summary
            assert figures[name]["mean"] >= 0
        assert figures["replicas_per_layer"].keys() == {"mean", "max"}
        assert figures["gb_s"].keys() == {"billed", "resident", "reserved", "paper"}
        assert all(value > 0 for value in figures["gb_s"].values())
        assert figures["plan_us"].keys() == figures["split_us"].keys() == {"p50", "p99"}
        for name in ("memory_factor", "cold_starts_per_layer_step"):
            assert isinstance(figures[name], float)
        assert isinstance(figures["blocking_loads_per_layer_step"], float)
    assert report["policies"]["oracle"]["straggler_ratio"]["max"] == 1.0
    assert report["trace"]["steps"] == 50
    assert report["trace"]["warm_up_steps"] == 5
    assert report["trace"]["zero_token_layer_steps"] == 0
    assert report["config"]["seed"] == 5
    assert report["config"]["prediction"] == "noisy:0.12"
    assert report["config"]["memory_factor"] == 2.0


def test_the_same_seed_gives_the_same_bytes_but_for_measured_times(everything):
    assert (everything / "1.npz").read_bytes() == (everything / "2.npz").read_bytes()
    first, again = load(everything / "1.json"), load(everything / "2.json")
    for report in (first, again):
        for figures in report["policies"].values():
            for name in MEASURED:
                del figures[name]
    assert json.dumps(first) == json.dumps(again)


def test_figures_can_be_recomputed_from_the_dump(everything, steps):
    report = load(everything / "1.json")
    with np.load(steps, allow_pickle=False) as archive:
        total_SL = archive["loads"].sum(axis=2).astype(np.int64)
    with np.load(everything / "1.npz", allow_pickle=False) as dump:
        names = {key.partition("/")[0] for key in dump}
        assert names == set(POLICIES.split(",")) - {"oracle"}
        for name in names:
            tokens_SLD, replicas_SLED = dump[f"{name}/device_tokens"], dump[f"{name}/replicas"]
            assert (tokens_SLD.dtype, tokens_SLD.shape) == (np.int64, (50, 3, 4))
            assert (replicas_SLED.dtype, replicas_SLED.shape) == (np.uint8, (50, 3, 8, 4))
            assert (tokens_SLD.sum(axis=2) == total_SL).all()
            figures = report["policies"][name]
            ratio = (tokens_SLD.max(axis=2) / -(-total_SL // 4))[5:]
            for key, value in (
                ("mean", ratio.mean()),
                ("p50", np.percentile(ratio, 50)),
                ("p99", np.percentile(ratio, 99)),
                ("max", ratio.max()),
            ):
                assert figures["straggler_ratio"][key] == pytest.approx(value, rel=1e-12)
            held = replicas_SLED.sum(axis=(2, 3))[5:]
            assert figures["replicas_per_layer"]["mean"] == pytest.approx(held.mean())
            assert figures["replicas_per_layer"]["max"] == held.max()
            assert figures["memory_factor"] == pytest.approx(held.mean() / 8)


def test_eplb_is_as_unbalanced_as_the_original_where_it_repeats_an_expert(tmp_path):
    """deepseek-ai/EPLB has 9 copies of the hot expert on 8 GPUs: mean / max GPU load is 0.563."""
    path = tmp_path / "hot.npz"
    # Nine times 800 tokens, so that each of nine copies gets a whole number of them.
    write_trace(make_trace([[[7200, 0, 0, 0, 0, 0, 0, 0]]] * 40), path)
    replay(
        *("--routing", path, "--expert-shape", "64x64", "--devices", 8, "--policies", "eplb"),
        *("--memory-factor", 2, "--eplb-interval", 2),
        *("--json", tmp_path / "out.json", "--dump", tmp_path / "out.npz"),
    )
    with np.load(tmp_path / "out.npz") as dump:
        tokens_D = dump["eplb/device_tokens"][-1, 0]
        copies_ED = dump["eplb/replicas"][-1, 0]
    assert tokens_D.mean() / tokens_D.max() == 0.5625
    assert copies_ED.max() == 2
    figures = load(tmp_path / "out.json")["policies"]["eplb"]
    assert figures["straggler_ratio"]["max"] == pytest.approx(1 / 0.5625)


def test_another_seed_gives_other_noise(everything, steps, tmp_path):
    replay(
        *("--routing", steps, "--expert-shape", "64x64", "--devices", 4, "--policies", "paper"),
        *("--seed", 6, "--dump", tmp_path / "other.npz"),
    )
    with np.load(tmp_path / "other.npz") as other, np.load(everything / "1.npz") as first:
        assert (other["paper/device_tokens"] != first["paper/device_tokens"]).any()


def test_requests_are_composed_into_prefill_steps_by_arrivals(requests, arrivals, tmp_path):
    replay(
        *("--routing", requests, "--arrivals", arrivals, "--policies", "static"),
        *("--devices", 2, "--json", tmp_path / "out.json"),
    )
    report = load(tmp_path / "out.json")
    assert report["trace"]["steps"] == 30
    assert report["config"]["expert"]["hidden"] == 4096  # of the model's name
    assert report["config"]["arrivals"] == "azure.csv"


def test_decode_steps_are_labelled_synthetic(requests, arrivals, tmp_path, capfd):
    replay(
        *("--routing", requests, "--arrivals", arrivals, "--compose", "decode"),
        *("--policies", "static,moeless", "--cost-model", "h200", "--memory-factor", "auto"),
        *("--devices", 2, "--json", tmp_path / "out.json", "--max-steps", 40),
    )
    report = load(tmp_path / "out.json")
    assert report["trace"]["phase"] == "decode (synthetic)"
    assert report["trace"]["steps"] == 40
    assert report["config"]["memory_factor"] == "auto"
    assert "decode (synthetic)" in capfd.readouterr().out


@pytest.mark.parametrize("cost_model", ["paper", "h200"])
def test_devices_may_be_of_unequal_speed(steps, tmp_path, cost_model):
    out = tmp_path / "out.json"
    options = ["--routing", steps, "--expert-shape", "4096x14336", "--cost-model", cost_model]
    options += ["--devices", 4, "--policies", POLICIES, "--optimum", 20, "--json", out]
    figures = {}
    for speeds in ("1,1,1,1", "1,1,0.5,0.5"):
        replay(*options, "--device-speeds", speeds)
        report = json.loads(out.read_text())
        figures[speeds] = report["policies"]
    assert report["config"]["cost"]["speeds"] == [1.0, 1.0, 0.5, 0.5]
    for name, found in figures["1,1,0.5,0.5"].items():
        equal = figures["1,1,1,1"][name]
        assert found["layer_forward_ms"]["mean"] > equal["layer_forward_ms"]["mean"]
        assert found["bound_ratio"]["mean"] >= (0.8 if name == "oracle" else 1.0)
    mine, static = figures["1,1,0.5,0.5"]["moeless"], figures["1,1,0.5,0.5"]["static"]
    assert mine["layer_forward_ms"]["mean"] < static["layer_forward_ms"]["mean"]
    assert mine["optimum"]["ratio"]["mean"] < 1.02


def test_equal_speeds_are_no_speeds(steps, tmp_path):
    reports = []
    for speeds in ([], ["--device-speeds", "1,1,1,1"]):
        out = tmp_path / "out.json"
        options = ["--expert-shape", "64x64", "--devices", 4, "--policies", "static,moeless"]
        replay("--routing", steps, *options, *speeds, "--json", out)
        policies = json.loads(out.read_text())["policies"]
        reports.append([[f for k, f in p.items() if k not in MEASURED] for p in policies.values()])
    assert reports[0] == reports[1]


def test_a_table_and_an_explanation_are_printed(steps, capfd):
    replay(
        *("--routing", steps, "--expert-shape", "64x64", "--devices", 4),
        *("--policies", "paper,moeless,oracle", "--explain", 20, 1, "--decision-us", 0),
    )
    out = capfd.readouterr().out
    assert "straggler mean" in out
    assert "oracle is lossy" in out
    assert "paper: step 20, layer 1" in out
    assert "the plan in force was made for step 20" in out
    assert "the planner says: " in out


def test_recorded_predictions_are_replayed(tmp_path):
    drawn = draw_trace(steps=30, layers=2)
    path = tmp_path / "steps.npz"
    write_trace(make_trace(drawn.loads_NLE, top_k=2, predicted=drawn.loads_NLE), path)
    shape = ("--routing", path, "--expert-shape", "64x64", "--policies", "paper")
    for kind in ("recorded", "exact"):
        replay(*shape, "--prediction", kind, "--dump", tmp_path / f"{kind}.npz")
    dumps = [(tmp_path / f"{kind}.npz").read_bytes() for kind in ("recorded", "exact")]
    assert dumps[0] == dumps[1]


def test_plots_are_drawn(steps, tmp_path):
    pytest.importorskip("matplotlib")
    replay(
        *("--routing", steps, "--expert-shape", "64x64", "--policies", "static,oracle"),
        *("--plots", tmp_path / "plots"),
    )
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3


def test_progress_is_shown_on_request(steps, capfd):
    replay(
        *("--routing", steps, "--expert-shape", "64x64", "--policies", "static", "--progress"),
    )
    assert "50/50" in capfd.readouterr().err


def test_a_trace_of_steps_refuses_arrivals_and_composition(fails, steps, arrivals):
    shape = ("--expert-shape", "64x64")
    line = fails("--routing", steps, "--arrivals", arrivals, *shape)
    assert "leave --arrivals out" in line
    assert "leave --compose out" in fails("--routing", steps, "--compose", "decode", *shape)


def test_a_trace_of_requests_needs_arrivals(fails, requests):
    line = fails("--routing", requests)
    assert "--arrivals" in line
    assert "requests.npz" in line


def test_an_output_must_not_replace_an_input_or_another_output(fails, steps, tmp_path):
    shape = ("--routing", steps, "--expert-shape", "64x64")
    before = steps.read_bytes()
    assert "would overwrite" in fails(*shape, "--dump", steps)
    assert "would overwrite" in fails(*shape, "--json", steps)
    both = tmp_path / "out"
    assert "would overwrite" in fails(*shape, "--json", both, "--dump", both)
    assert steps.read_bytes() == before


def test_an_unknown_model_needs_a_shape(fails, steps):
    assert "--expert-shape HIDDENxINTER" in fails("--routing", steps)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--policies", "static,best"), "unknown policy 'best'"),
        (("--policies", "static,static"), "names static twice"),
        (("--policies", ","), "--policies is empty"),
        (("--prediction", "gate"), "prediction 'gate' is unknown"),
        (("--prediction", "noisy:x"), "sigma"),
        (("--prediction", "recorded"), "no predicted loads"),
        (("--prediction", "ewma", "--distance", "2"), "looks back"),
        (("--distance", "3"), "the trace has 3 layers"),
        (("--cost-model", "b200"), "b200"),
        (("--device-speeds", "1,fast"), "'fast' is not a speed"),
        (("--devices", "2", "--device-speeds", "1,1e-300"), "'1e-300' is not a speed"),
        (("--misc-ms", "1e308"), "use 0 to 3600 seconds"),
        (("--devices", "3", "--device-speeds", "1,1"), "2 speeds for 3 devices"),
        (("--memory-factor", "0.5"), "--memory-factor '0.5'"),
        (("--memory-factor", "much"), "nor auto"),
        (("--devices", "0"), "--devices is 0"),
        (("--devices", "100000"), "use at most 4096"),
        (("--seed", "-1"), "--seed is -1"),
        (("--max-steps", "0"), "--max-steps is 0"),
        (("--expert-shape", "64"), "HIDDENxINTER"),
        (("--keep-alive", "-1"), "--keep-alive is -1"),
        (("--decision-us", "nan"), "decision_s is nan"),
        (("--eplb-interval", "0"), "eplb_interval_s is 0"),
        (("--device-memory", "10KB"), "--device-memory 10,000 bytes is too small"),
        (("--device-memory", "lots"), "--device-memory 'lots' is not a size"),
        (("--explain", "50", "0"), "step 50 is not in 0..49"),
        (("--explain", "0", "3"), "layer 3 is not in 0..2"),
        (("--json", "/no/such/folder/out.json"), "directory does not exist"),
        (("--dump", "/"), "is a directory"),
        (("--json", "/proc/self/out.json"), "cannot be written to"),
        (("--compose", "both"), "--compose"),
        (("--cv-threshold", "-1", "--policies", "paper"), "policy paper: planner paper"),
    ],
)
def test_bad_options_are_refused_in_one_line(fails, steps, options, part):
    assert part in fails("--routing", steps, "--expert-shape", "64x64", *options)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no archive", None])
def test_files_that_are_no_traces_are_refused(fails, tmp_path, content):
    path = tmp_path / "trace.npz"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in fails("--routing", path, "--expert-shape", "64x64")


def test_a_trace_that_contradicts_itself_is_refused_with_its_place(fails, tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(make_trace([[[2, 2]], [[2, 2]]]), path)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["loads"][1, 0, 1] += 1
    np.savez(path, **arrays)
    assert "n=1, l=0" in fails("--routing", path, "--expert-shape", "64x64")


def test_an_interrupted_replay_leaves_no_process_behind(tmp_path):
    path = tmp_path / "long.npz"
    write_trace(draw_trace(steps=3000, layers=8), path)
    command = [sys.executable, "-m", "moeless", "replay", "--routing", str(path), "--progress"]
    process = subprocess.Popen(
        [*command, "--expert-shape", "64x64", "--policies", "paper,swift"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path), "FORCE_COLOR": "1"},
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while len(children := _children(process.pid)) < 2:
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err.decode().strip().endswith("moeless: error: interrupted")
    # One that was being started when the signal came ends as soon as nobody hears its reports.
    while [pid for pid in children if _is_running(pid)]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["long.npz"]


def _children(pid):
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


def _is_running(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_policy_whose_process_dies_is_named(fails, steps, monkeypatch, tmp_path):
    """Whatever ends a process, one line says which policy it was and its last words."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'moeless.bootstrap.replays.replay_process' in sys.orig_argv:\n"
        "    raise SystemExit('out of luck')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = fails("--routing", steps, "--expert-shape", "64x64", "--policies", "static", code=1)
    assert "policy static" in line
