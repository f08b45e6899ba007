import csv
import json

import pytest

from moeless.errors import ConfigError
from moeless_experiments.context import Context
from moeless_experiments.figure import NOT_IN_OUR_COPY, Experiment, Finding, Plot, Result, Table
from moeless_experiments.manifest import describe, find_commit
from moeless_experiments.writing import require_writable, write_result, write_table


def make_result(rows=((1, 0.25, None, True),)):
    return Result(
        provenance="simulated",
        tables=(Table(name="data", columns=("n", "share", "gap", "held"), rows=rows),),
        findings=(Finding(what="share", ours="0.25"),),
        interpretation="One paragraph.",
        config={"devices": 8},
    )


def draw_a_line(figure):
    figure.subplots().plot([0, 1], [0, 1])


def test_a_row_with_a_cell_too_few_is_refused():
    with pytest.raises(ValueError, match="has not 4 cells"):
        make_result(rows=((1, 2.0, 3),))


def test_cells_are_written_so_that_a_spreadsheet_reads_them(tmp_path):
    write_table(tmp_path / "t.csv", make_result().tables[0])
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["n", "share", "gap", "held"], ["1", "0.25", "", "yes"]]


def test_the_same_result_gives_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    result = Result(
        provenance="simulated",
        tables=make_result().tables,
        plots=(Plot(name="line", draw=draw_a_line),),
        interpretation="",
    )
    for name in ("a", "b"):
        write_result(tmp_path / name, result, dict)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["data.csv", "line.png", "line.svg", "manifest.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_failed_plot_leaves_the_result_of_before(tmp_path):
    pytest.importorskip("matplotlib")
    write_result(tmp_path / "fig", make_result(), lambda: {"run": 1})

    def fail(figure):
        raise RuntimeError("no ink")

    broken = Result(
        provenance="simulated",
        tables=(),
        plots=(Plot(name="x", draw=fail),),
        interpretation="",
    )
    with pytest.raises(RuntimeError):
        write_result(tmp_path / "fig", broken, dict)
    assert json.loads((tmp_path / "fig" / "manifest.json").read_text()) == {"run": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["fig"]


def test_a_directory_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file cannot be written .*name another"):
        require_writable(tmp_path / "file")


def test_the_manifest_says_where_numbers_come_from(tmp_path):
    experiment = Experiment(id="fig00", title="T", claim="C.", run=lambda _: make_result())
    context = Context(out=tmp_path, cache=tmp_path, seed=3, threads=2, quick=True)
    manifest = describe(experiment, make_result(), context, took_s=1.26)
    assert manifest["provenance"] == manifest["tables"][0]["provenance"] == "simulated"
    assert (manifest["seed"], manifest["quick"], manifest["took_s"]) == (3, True, 1.3)
    assert manifest["findings"][0]["paper"] == NOT_IN_OUR_COPY
    assert manifest["config"] == {"devices": 8}
    assert "numpy" in manifest["versions"]
    assert "cores" in manifest["device"]
    json.dumps(manifest)


def test_a_file_that_git_does_not_know_has_no_commit(tmp_path):
    (tmp_path / "module.py").touch()
    assert find_commit(tmp_path / "module.py") is None
