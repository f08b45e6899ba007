"""``moeless replay --optimum``: policies against the best split over their own replicas."""

import json
import sys

import numpy as np
import pytest

from fakes.replays import draw_trace
from moeless.cli.main import run
from moeless.workloads.routing_trace import write_trace


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "steps.npz"
    write_trace(draw_trace(steps=50, layers=3, experts=8, top_k=2, tokens=400), path)
    return path


def replay(*arguments, code=0):
    fixed = ("--expert-shape", "64x64", "--devices", 4, "--seed", 3)
    assert run(["replay", *(str(argument) for argument in (*fixed, *arguments))]) == code


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_figures_and_table_hold_each_policy_against_its_optimum(steps, tmp_path, capfd):
    out = tmp_path / "out.json"
    replay(
        *("--routing", steps, "--policies", "static,paper,moeless,oracle"),
        *("--optimum", 20, "--json", out),
    )
    report = load(out)
    assert report["config"]["optimum"] == 20
    policies = report["policies"]
    assert "optimum" not in policies["oracle"]
    for name in ("static", "paper", "moeless"):
        found = policies[name]["optimum"]
        assert found["samples"] == 20
        assert found["solved"] + found["waited"] == 20
        assert found["ratio"].keys() == {"mean", "p50", "p99", "max"}
    assert policies["static"]["optimum"]["ratio"]["max"] == pytest.approx(1.0)
    assert policies["moeless"]["optimum"]["ratio"]["mean"] < 1.001
    assert policies["moeless"]["optimum"]["solved"] == 20
    printed = capfd.readouterr().out
    assert "÷ optimum mean" in printed
    assert "20/20" in printed


def test_a_price_of_touching_makes_it_a_mixed_integer_program(steps, tmp_path):
    out = tmp_path / "out.json"
    replay(
        *("--routing", steps, "--policies", "eplb,moeless", "--cost-model", "h200"),
        *("--optimum", 10, "--json", out),
    )
    for figures in load(out)["policies"].values():
        assert figures["optimum"]["solved"] == 10
        assert figures["optimum"]["ratio"]["mean"] > 0.999


def test_the_optimum_is_of_the_replicas_in_the_dump(steps, tmp_path):
    """Sampling changes nothing else, and whoever has the dump can solve it all."""
    plain, sampled = tmp_path / "plain.npz", tmp_path / "sampled.npz"
    replay("--routing", steps, "--policies", "moeless", "--dump", plain)
    replay("--routing", steps, "--policies", "moeless", "--dump", sampled, "--optimum", 5)
    assert plain.read_bytes() == sampled.read_bytes()
    with np.load(plain) as dump:
        assert dump["moeless/replicas"].any()


def test_by_default_nothing_is_solved(steps, tmp_path, capfd):
    out = tmp_path / "out.json"
    replay("--routing", steps, "--policies", "static", "--json", out)
    assert "optimum" not in load(out)["policies"]["static"]
    assert "optimum" not in capfd.readouterr().out


def fail(capfd, *arguments):
    capfd.readouterr()
    replay(*arguments, code=2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_negative_number_of_samples_is_refused(steps, capfd):
    assert "--optimum is -1" in fail(capfd, "--routing", steps, "--optimum", -1)


def test_measured_tables_have_no_program_to_solve(steps, tmp_path, capfd):
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"tokens": [1, 100], "seconds": [1e-4, 2e-4]}))
    line = fail(capfd, "--routing", steps, "--optimum", 5, "--cost-model", table)
    assert "--optimum needs a linear time model" in line


def test_without_scipy_the_extra_is_named(steps, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    line = fail(capfd, "--routing", steps, "--optimum", 5)
    assert "pip install 'moeless[replay]'" in line
