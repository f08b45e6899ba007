"""``moeless plan`` from the command line: figures, files, explanations, one-line errors."""

import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moeless.cli.main import run
from moeless.policies.planners import PLANNERS

LOADS = "800,0,0,0,0,0,0,0\n500,300,10,10,10,10,10,10\n420,390,180,120,90,60,50,40\n"


@pytest.fixture
def loads(tmp_path):
    path = tmp_path / "loads.csv"
    path.write_text(LOADS)
    return path


@pytest.fixture
def plan(loads, capsys):
    """Run the command; returns what it printed."""

    def call(*arguments: object, code: int = 0, path=loads, policy="eplb"):
        words = ["plan", str(path), "--policy", policy, *(str(a) for a in arguments)]
        assert run(words) == code
        out, err = capsys.readouterr()
        if code:
            assert out == ""
            assert len(err.splitlines()) == 1
            return err
        return out

    return call


def test_the_table_shows_before_and_after(plan):
    out = plan("--devices", 8, "--slots", 16)
    line = next(line for line in out.splitlines() if " 860 " in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:5] == ["1", "860", "0.215", "0.717", "0.717"]
    assert cells[5] == "6 2 1 1 1 1 1 1"


def test_bytes_come_from_the_model_or_the_option(plan):
    assert "12.33 GB" in plan("--slots", 16, "--model", "mixtral-8x7b", "--layers", 3)
    assert "35.00 GB" in plan("--slots", 16, "--expert-bytes", "1GB")


def test_json_has_the_placement_and_the_figures(plan):
    data = json.loads(plan("--slots", 16, "--output", "json", "--explain", "--layer", 2))
    assert data["format"] == "moeless-placement"
    assert [layer["layer"] for layer in data["layers"]] == [0, 1, 2]
    (layer,) = data["report"]["layers"]
    assert layer["balance"]["even"] == pytest.approx(0.9, abs=0.001)
    assert len(layer["experts"]) == 8
    assert layer["experts"][0]["why"]


@pytest.mark.parametrize("output", ["json", "sglang", "trtllm"])
def test_what_is_written_can_be_given_as_the_placement_in_force(plan, tmp_path, output):
    target = tmp_path / "placement"
    plan("--slots", 16, "--output", output, "-o", target)
    again = json.loads(plan("--slots", 16, "--current", target, "--output", "json"))
    # Where a format needs all slots used, EPLB's duplicates were replaced; they are not again.
    assert again["report"]["copies"] <= (0 if output == "json" else 2)
    assert not list(tmp_path.glob(".*.part"))


def test_the_explanation_names_the_layer_and_every_expert(plan):
    out = plan("--slots", 16, "--explain", "--layer", 1)
    assert "Layer 1, expert by expert" in out
    assert "Layer 0, expert by expert" not in out
    assert "off the hottest" in out


def test_all_zero_loads_copy_nothing(plan, tmp_path):
    path = tmp_path / "zero.csv"
    path.write_text("0,0,0,0,0,0,0,0\n")
    said = plan("--slots", 16, path=path)
    assert "0 replicas" in said
    assert "No layer has a token" in said
    assert "0.000" not in said


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
@pytest.mark.parametrize("kind", ["csv", "npy", "json.gz"])
def test_loads_come_through_a_pipe_too(tmp_path, name, kind):
    table = np.array([line.split(",") for line in LOADS.split()], dtype=int)
    path = tmp_path / f"loads.{kind}"
    if kind == "npy":
        np.save(path, table)
    else:
        text = LOADS if kind == "csv" else json.dumps({"logical_count": table.tolist()})
        path.write_bytes(text.encode() if kind == "csv" else gzip.compress(text.encode()))
    command = [sys.executable, "-m", "moeless", "plan", name, "--slots", "16", "--output", "json"]
    done = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=True)
    report = json.loads(done.stdout)["report"]
    assert report["loads"].startswith("stdin (")
    assert [layer["tokens"] for layer in report["layers"]] == table.sum(axis=1).tolist()


def test_what_is_wrong_in_a_pipe_is_told_of_the_pipe(plan, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for content, said in ((b"", "fifo: the file is empty"), (b"\x00", "fifo: no known format")):
        with ThreadPoolExecutor() as pool:
            pool.submit(fifo.write_bytes, content)
            assert f"error: {said}" in plan(code=2, path=fifo)
    assert "/dev/null: is not a regular file" in plan(code=2, path="/dev/null")


def test_the_loads_are_not_overwritten(plan, loads, tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to(loads)
    for path in (loads, link):
        said = plan("--slots", 16, "--output", "json", "-o", path, code=2)
        assert "would overwrite the loads" in said
    assert loads.read_text() == LOADS


@pytest.mark.parametrize("name", ["loop", "in a file", "/proc/x.json", "dir"])
def test_where_nothing_can_be_written_that_is_said_and_nothing_replaced(plan, tmp_path, name):
    path = tmp_path / name
    if name == "loop":
        path.symlink_to(path)
    elif name == "dir":
        path.mkdir()
    elif name == "in a file":
        path = tmp_path / "loads.csv" / "x.json"
    before = os.lstat(path) if os.path.lexists(path) else None
    assert "cannot be written" in plan("--slots", 16, "--output", "json", "-o", path, code=2)
    assert (os.lstat(path) if os.path.lexists(path) else None) == before


@pytest.mark.parametrize("policy", ["paper", "static", "swift"])
def test_other_policies(plan, policy):
    assert policy in plan("--slots", 16, policy=policy)


def test_time_may_be_balanced_instead_of_tokens(plan):
    out = plan("--slots", 16, "--model", "mixtral-8x7b", "--layers", 3, "--cost-model", "h200")
    assert "the least possible layer time / the layer time" in out


@pytest.mark.parametrize("split", ["even", "min-time"])
def test_slow_devices_get_less(loads, capsys, split):
    arguments = ["plan", str(loads), "--slots", "16", "--split", split, "--output", "json"]
    found = []
    for speeds in ([], ["--device-speeds", "1,1,1,1,1,1,0.5,0.5"]):
        assert run([*arguments, *speeds]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] != found[1]


@pytest.mark.skipif("moeless" not in PLANNERS.names(), reason="needs the planner moeless")
def test_by_default_it_plans_for_engines_that_split_evenly(loads, capsys):
    assert run(["plan", str(loads), "--slots", "16"]) == 0
    assert capsys.readouterr().out.startswith("even_split on 8 devices")


def test_for_moeless_itself_it_plans_for_its_own_split(loads, capsys):
    assert run(["plan", str(loads), "--slots", "16", "--split", "min-time"]) == 0
    assert capsys.readouterr().out.startswith("moeless on 8 devices")


def test_a_split_is_refused_where_the_policy_has_its_own(loads, capsys):
    assert run(["plan", str(loads), "--policy", "eplb", "--split", "even"]) == 2
    assert "--split goes with --policy moeless" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slots", 4], "each of 8 experts needs one"),
        (["--slots", 12], "do not divide 12"),
        (["--device-memory", "1GB"], "--expert-bytes or --model"),
        (["--device-memory", "lots"], "not a size"),
        (["--slots", 16, "--device-memory", "1GB"], "give one of them"),
        (["--model", "gpt-2"], "known are"),
        (["--model", "mixtral-8x7b"], "3 layers, mixtral-8x7b has 32"),
        (["--cost-model", "h200"], "give --model"),
        (["--experts", 4], "physical slots"),
        (["--device-speeds", "1,2"], "2 speeds for 8 devices"),
        (["--format", "yaml"], "unknown format 'yaml'"),
        (["--current", "nowhere.json"], "no such file"),
        (["--layer", 9], "--layer 9 is not in the loads"),
        (["--output", "sglang", "--explain"], "--output table or json"),
        (["--slots", 16, "-o", "no/such/dir/x"], "cannot be written"),
        (["--devices", 0], "--devices"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(plan, arguments, said):
    assert said in plan(*arguments, code=2)


def test_bad_loads_are_one_line_and_exit_code_2(plan, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("1,2\n3,nan\n")
    assert "layer 1, expert 1: load nan" in plan(code=2, path=path)
    assert "no such file" in plan(code=2, path=tmp_path / "none.csv")


def test_a_pt_file_without_torch_names_the_extra(plan, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    path = tmp_path / "dump.pt"
    torch.save({"logical_count": torch.ones(1, 2, 8, dtype=torch.int32)}, path)
    assert "static" in plan("--slots", 16, path=path)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert "pip install 'moeless[transformers]'" in plan(code=2, path=path)
