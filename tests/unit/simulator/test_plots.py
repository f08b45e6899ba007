"""Pictures of a replay."""

import sys

import pytest

from fakes.replays import draw_trace, run
from moeless.errors import ConfigError, MissingExtraError
from moeless.simulator.plots import require_matplotlib, write_plots


def test_three_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    trace = draw_trace(steps=500, layers=1)
    recordings = {name: run(trace, name) for name in ("static", "paper")}
    paths = write_plots(recordings, trace.loads_NLE, tmp_path / "new")
    assert sorted(path.name for path in paths) == [
        "layer_forward_cdf.png",
        "replicas.png",
        "straggler_ratio.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    trace = draw_trace(steps=3)
    with pytest.raises(ConfigError, match="file"):
        write_plots({"static": run(trace, "static")}, trace.loads_NLE, tmp_path / "file")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"moeless\[replay\]"):
        require_matplotlib()
