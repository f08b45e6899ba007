"""However a server ends, nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from effort import PATIENCE_S

STREAM = {
    "model": "tiny-granite",
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": True,
    "max_tokens": 400,
    "ignore_eos": True,
}


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize(
    "sign", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_and_leaves_nothing(model_dir, start_serving, sign):
    before = shared_memory()
    server = start_serving(model_dir, "--max-model-len", "512")
    assert len(server.family) >= 3, "a supervisor and two workers"
    started, ended = threading.Event(), threading.Event()

    def read() -> None:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=STREAM, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                started.set()
                if line == "data: [DONE]":
                    ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(PATIENCE_S)
    assert server.stop(sign) == 0
    reader.join(PATIENCE_S)
    assert ended.is_set(), "an open stream is ended, not torn off"
    assert server.left_behind() == []
    assert shared_memory() <= before
    assert list(server.runtime_dir.iterdir()) == []


# What a server has said last when the signal comes; nothing: at once.
MOMENTS = [None, "loading everything but the experts", "starting experts", "workers run"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_it_ends_in_the_same_way_whenever_the_system_asks_it_to(model_dir, tmp_path, moment):
    command = [sys.executable, "-m", "moeless", "serve", str(model_dir), "--port", "0"]
    command += ["--invoker", "process"]
    environment = dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    last = MOMENTS[2] if moment == "workers run" else moment
    while last is not None and last not in process.stderr.readline():
        assert process.poll() is None
    me = psutil.Process(process.pid)
    while moment == "workers run" and len(me.children(recursive=True)) < 2:
        assert process.poll() is None
    family = me.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGTERM
    assert "rror" not in process.stderr.read()
    process.stderr.close()
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_devices_that_share_one_memory_are_served_without_a_process(model_dir, start_serving):
    server = start_serving(model_dir, "--invoker", "auto", "--devices", "cpu:2")
    assert server.family == []
    shown = httpx.get(f"{server.url}/moeless/experts").json()
    assert shown["devices"] == ["cpu:0", "cpu:1"]
    short = STREAM | {"stream": False, "max_tokens": 4}
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, json=short, timeout=PATIENCE_S).status_code == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_a_killed_engine_takes_its_supervisor_and_workers_along(model_dir, start_serving):
    server = start_serving(model_dir)
    server.process.kill()
    server.process.wait()
    assert psutil.wait_procs(server.family, timeout=PATIENCE_S)[1] == []
    assert list(server.runtime_dir.iterdir()) == []


@pytest.mark.slow
def test_a_server_whose_supervisor_is_gone_says_so(model_dir, start_serving):
    server = start_serving(model_dir)
    assert httpx.get(f"{server.url}/health").status_code == 200
    supervisor = next(p for p in server.family if "supervisor_process" in " ".join(p.cmdline()))
    supervisor.kill()
    # The engine started it, and whoever it was stays in the list of processes until it ends.
    others = [process for process in server.family if process != supervisor]
    assert psutil.wait_procs(others, timeout=PATIENCE_S)[1] == []
    assert httpx.get(f"{server.url}/health").status_code == 503
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=STREAM | {"stream": False})
    assert answer.status_code == 503
    assert set(answer.json()) == {"error"}
    assert server.stop() == 0
    assert server.left_behind() == []
