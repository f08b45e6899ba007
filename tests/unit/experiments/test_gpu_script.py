import csv
import importlib
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("gpu_experts")


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["gpu_experts.py", *map(str, arguments)])
    script.main()


def read_rows(path):
    comment, *lines = path.read_text("utf8").splitlines()
    return comment, list(csv.DictReader(lines))


def test_the_script_for_gpus_runs_on_a_cpu_with_tiny_shapes(script, monkeypatch, tmp_path):
    run(script, monkeypatch, "--device", "cpu", "--models", "phi-3.5-moe", "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text("utf8"))
    assert summary["device"] == "CPU"
    assert summary["tiny"]
    comment, layers = read_rows(tmp_path / "layer_times.csv")
    assert "emulated on CPU, tiny shapes" in comment
    assert {row["policy"] for row in layers} == {"static", "eplb", "swift", "paper", "moeless"}
    assert all(float(row["layer_ms"]) > 0 for row in layers)
    for name, column in (("loads", "load_gb_per_s"), ("overlap", "serial_ms")):
        _, rows = read_rows(tmp_path / f"{name}.csv")
        assert rows
        assert all(float(row[column]) > 0 for row in rows)


def test_a_gpu_that_is_not_there_is_said_in_one_line(script, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        run(script, monkeypatch, "--out", tmp_path)
