"""``moeless reproduce`` from the command line to files."""

import csv
import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from fakes.gate_recordings import draw_gates, record_tokens
from moeless.cli.main import moeless, run
from moeless.workloads.prompts import DATA_DIR_VARIABLE
from moeless.workloads.routing_trace import write_trace
from moeless.workloads.synthetic import TraceSize, power_law
from moeless_experiments.context import Context
from moeless_experiments.studies.forecast_replays import Asked, Setting, replay
from moeless_experiments.studies.forecast_traces import Forecast, make_trace
from moeless_experiments.studies.predictor_bench import SMALL_BATCHES
from moeless_experiments.studies.predictor_kinds import RIDGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Recordings under the names of the demo model, of a much smaller one."""
    directory = tmp_path_factory.mktemp("shards")
    for prompts in ("arena", "sharegpt"):
        record_tokens(
            directory / f"demo16_{prompts}",
            gates=draw_gates(layers=8),
            noise=0.2,
            conversations=24,
            tokens=100,
        )
    return directory


def test_the_command_is_found_through_its_entry_point():
    if "reproduce" not in moeless.list_commands(None):
        pytest.skip("moeless was installed before this command was added; install it again")
    assert moeless.get_command(None, "reproduce").name == "reproduce"


def test_what_there_is_can_be_listed(capfd):
    assert run(["reproduce", "--list"]) == 0
    assert capfd.readouterr().out.startswith("fig0")


def test_an_unknown_figure_is_refused_in_one_line(tmp_path, capfd):
    assert run(["reproduce", "fig99", "--out", str(tmp_path / "out")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no experiment 'fig99'; use fig01" in line
    assert not (tmp_path / "out").exists()


def test_a_directory_without_recordings_is_refused_in_one_line(tmp_path, capfd):
    (tmp_path / "none").mkdir()
    command = ["reproduce", "fig6", "--quick", "--out", str(tmp_path / "out")]
    assert run([*command, "--shards", str(tmp_path / "none")]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "has no recordings of demo16" in line


def test_a_figure_becomes_data_plots_and_a_manifest(tmp_path, shards):
    out = tmp_path / "out"
    assert run(["reproduce", "fig6", "--quick", "--shards", str(shards), "--out", str(out)]) == 0
    manifest = json.loads((out / "fig06" / "manifest.json").read_text())
    assert manifest["provenance"] == "measured"
    assert manifest["config"]["prompts"] == ["arena", "sharegpt"]
    files = {path.name for path in (out / "fig06").iterdir()}
    assert files >= {"layers.csv", "similarity.png", "similarity.svg", "accuracy.png"}
    lines = (out / "fig06" / "layers.csv").read_text().splitlines()
    # Two sources of prompts, d = 1 to 5, and layers d to 7 each.
    assert len(lines) == 1 + 2 * sum(8 - d for d in range(1, 6))


def test_the_figures_on_predictors_share_what_they_train(tmp_path, shards, monkeypatch):
    monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path / "cache"))
    names = ["fig7", "fig11", "fig12", "table2", "predictors"]
    out = tmp_path / "out"
    command = ["reproduce", *names, "--quick", "--shards", str(shards), "--out", str(out)]
    assert run(command) == 0
    found = {
        name: json.loads((out / name / "manifest.json").read_text())
        for name in ("fig07", "fig11", "fig12", "table2", "predictors")
    }
    assert all(manifest["interpretation"] for manifest in found.values())
    with (out / "predictors" / "figures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    accuracy = {
        (row["predictor"], row["tested_on"]): float(row["load_accuracy"])
        for row in rows
        if (row["distance"], row["batching"], row["batch"]) == ("1", "recorded", "256")
    }
    with (out / "fig11" / "accuracy.csv").open(newline="") as file:
        shown = [row for row in csv.DictReader(file) if row["distance"] == "1"]
    # The recorded states are turned from layer to layer: copied gates know nothing of that.
    assert accuracy["ridge", "sharegpt"] > accuracy["gate reuse", "sharegpt"] + 0.05
    for row in shown:
        assert abs(float(row["load_accuracy"]) - accuracy[row["predictor"], row["tested_on"]]) < (
            1e-4
        )
    # What takes long is kept for the next run: perceptrons of two distances, and all else.
    kept = [path.name for path in (tmp_path / "cache" / "experiments" / "predictors").iterdir()]
    assert len([name for name in kept if name.startswith("mlp-")]) == 2


def test_overheads_are_measured_and_their_timings_kept_apart(tmp_path, shards):
    out = tmp_path / "out"
    command = ["reproduce", "overheads", "--quick", "--shards", str(shards), "--out", str(out)]
    assert run(command) == 0
    with (out / "overheads" / "prediction_delays.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} >= {"mixtral-8x7b"}
    assert all(float(row["refitted_ms"]) > 0.0 for row in rows)
    with (out / "overheads" / "training_memory.csv").open(newline="") as file:
        memory = {(row["model"], row["method"]): int(row["mib"]) for row in csv.DictReader(file)}
    assert 100 < memory["mixtral-8x7b", "finetune"] < memory["mixtral-8x7b", "ridge"] < 2049


def test_a_trace_with_forecasts_is_replayed(tmp_path, shards):
    context = Context(out=tmp_path, cache=tmp_path / "cache", quick=True, threads=1, shards=shards)
    forecast = Forecast("demo16", "arena", "sharegpt", 1, RIDGE, SMALL_BATCHES)
    trace = make_trace(context, forecast)
    asked = Asked(trace, "recorded", Setting("moeless", 1.5))
    found = replay(context, [asked], distance=1, expert_shape="4096x14336")
    assert list(found) == [asked]
    assert 1.0 <= found[asked]["straggler_ratio"]["mean"] < 2.0


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """The public data's files, with few requests through two layers."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "routing").mkdir()
    (folder / "arrivals").mkdir()
    size = TraceSize(num_layers=2, num_experts=8, top_k=2, steps=20, tokens=64)
    trace = power_law(size, 1)
    meta = replace(trace.meta, model="mixtral-8x7b", unit="requests")
    requests = replace(trace, meta=meta, time_s_N=None)
    write_trace(requests, folder / "routing" / "mixtral-8x7b_mmlu_requests.npz")
    rows = [f"2023-11-16 18:{n // 60:02d}:{n % 60:02d}.0,100,10" for n in range(1000)]
    csv_file = folder / "arrivals" / "AzureLLMInferenceTrace_conv.csv"
    csv_file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return folder


def test_a_simulated_figure_is_the_same_bytes_for_the_same_seed(tmp_path, small_data, monkeypatch):
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(small_data))
    found = {}
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        # Each run has a cache of its own, so that nothing is only read back.
        monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path / f"cache-{name}"))
        command = ["reproduce", "pauses", "--quick", "--processes", "1", "--seed", str(seed)]
        assert run([*command, "--out", str(tmp_path / name)]) == 0
        found[name] = (tmp_path / name / "pauses" / "sweep.csv").read_bytes()
    assert found["first"] == found["again"]
    assert found["first"] != found["other"]


def test_the_same_bytes_come_out_of_one_process_and_of_two(
    tmp_path, shards, small_data, monkeypatch
):
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(small_data))
    names, found = ["fig6", "fig12", "pauses"], {}
    for processes in ("1", "2"):
        monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path / f"cache-{processes}"))
        out = tmp_path / processes
        command = ["reproduce", *names, "--quick", "--processes", processes, "--out", str(out)]
        assert run([*command, "--shards", str(shards)]) == 0
        found[processes] = {
            str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.csv")
        }
    assert len(found["1"]) >= len(names)
    assert found["1"] == found["2"]
