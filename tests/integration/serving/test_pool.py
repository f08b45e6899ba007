"""``moeless pool serve`` and a server that attaches to it, as processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import psutil
import pytest

from effort import PATIENCE_S
from moeless.cli.main import run

pytestmark = pytest.mark.slow


class PoolProcess:
    """``moeless pool serve`` and its workers."""

    def __init__(self, directory):
        command = [sys.executable, "-m", "moeless", "pool", "serve", "--pool", str(directory)]
        command += ["--devices", "cpu:2", "--device-memory", "20MB"]
        self.process = subprocess.Popen(
            command,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert "a pool of 2 devices is served in" in line, self.process.stderr.read()
        self.workers = psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, sign):
        self.process.send_signal(sign)
        code = self.process.wait(timeout=PATIENCE_S)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture
def directory(short_dir):
    return short_dir / "pool"


@pytest.fixture
def short_dir():
    """Sockets have short paths."""
    made = Path(tempfile.mkdtemp(prefix="moe-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start_pool(directory):
    started = []

    def start():
        started.append(PoolProcess(directory))
        return started[-1]

    yield start
    for pool in started:
        if pool.process.poll() is None:
            pool.stop(signal.SIGKILL)


def ask(server):
    body = {"model": "tiny-granite", "prompt": "a b", "max_tokens": 5, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_a_server_attaches_and_its_end_or_death_leaves_the_pool_as_it_was(
    start_pool, start_serving, serving, model_dir, directory, capsys
):
    pool = start_pool()
    options = ["--dtype", "float32", "--pool", str(directory), "--memory-share", "50%"]
    server = start_serving(model_dir, *options)
    assert ask(server) == ask(serving)
    assert run(["pool", "list", "--pool", str(directory), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["model"], shown["engines"], shown["share"]) == ("tiny-granite", 1, "50%")
    assert shown["guaranteed_bytes"] == 20_000_000
    assert 0 < shown["held_bytes"] <= 40_000_000
    assert not [child for child in server.family if child.is_running()], "it started no workers"
    server.stop(signal.SIGKILL)
    assert pool.process.poll() is None
    assert all(worker.is_running() for worker in pool.workers)
    assert pool.stop(signal.SIGTERM) == -signal.SIGTERM
    assert not psutil.wait_procs(pool.workers, timeout=PATIENCE_S)[1]
    assert not directory.exists()


def test_a_pool_that_was_killed_leaves_a_directory_that_can_be_used_again(
    start_pool, directory, capsys
):
    first = start_pool()
    arguments = ["pool", "serve", "--pool", str(directory), "--device-memory", "1MB"]
    assert run(arguments) == 2
    assert "a pool is served there already" in capsys.readouterr().err
    first.stop(signal.SIGKILL)
    assert (directory / "supervisor.sock").is_socket()
    second = start_pool()
    assert second.stop(signal.SIGINT) == 0
    assert not (directory / "supervisor.sock").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--pool", "/nowhere/pool"], "no pool is there; start one with"),
        (["--pool", "/nowhere/pool", "--devices", "cpu:3"], "leave --devices out"),
        (["--pool", "/nowhere/pool", "--memory-share", "120%"], "use a part of each device"),
        (["--memory-share", "20%"], "name the pool with --pool DIR"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line_before_anything_is_loaded(
    options, reason, model_dir, capsys
):
    assert run(["serve", str(model_dir), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert reason in error
