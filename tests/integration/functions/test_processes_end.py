"""Whoever dies, nothing is left behind and nobody hangs."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moeless.errors import FunctionError

ENGINE = """
import json, sys
from pathlib import Path
from moeless.bootstrap.serving.experts import start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.engines.transformers.loader import load_engine_model

loaded = load_engine_model(Path(sys.argv[1]))
runtime = start_experts(
    loaded,
    ExpertsConfig(
        devices=parse_devices("cpu:2"), linger_s=0.3, policy=PolicyConfig(policy=sys.argv[2])
    ),
)
if sys.argv[3] == "busy":
    import threading, torch
    def work():
        while True:
            loaded.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20)
    threading.Thread(target=work, daemon=True).start()
pids = runtime.client.report()["worker_pids"]
print(json.dumps([runtime.supervisor.process.pid, *pids]), flush=True)
sys.stdin.read()
"""


def in_shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir() if "moeless" in path.name}


@pytest.mark.parametrize("mood", ["idle", "busy"])
def test_after_an_engine_was_killed_its_supervisor_and_workers_end_and_leave_nothing(
    mood, reference, runtime_dir, wait_until, all_ended
):
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(reference[0]), "paper", mood],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir), "OMP_NUM_THREADS": "1"},
    )
    try:
        pids = json.loads(engine.stdout.readline())
        assert len(pids) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert len(list(runtime_dir.iterdir())) == 1
    finally:
        engine.kill()
        engine.wait()
        engine.stdin.close()
        engine.stdout.close()
    wait_until(lambda: all_ended(pids))
    wait_until(lambda: not list(runtime_dir.iterdir()))
    assert not in_shared_memory()


def test_after_the_supervisor_was_killed_workers_end_and_the_engine_says_so(
    serve, reference, tokens_of, wait_until, all_ended
):
    served = serve(reference[0], invocation_timeout_s=3600)  # the error does not wait for it
    pids = served.worker_pids()
    supervisor = served.runtime.supervisor.process
    begin, calls = served.runtime.invoker.begin, []

    def begin_and_kill(*arguments, **keywords):
        calls.append(0)
        if len(calls) == 8:
            os.kill(pids[0], signal.SIGSTOP)  # it cannot answer before the supervisor is gone
            supervisor.kill()
            supervisor.wait()
        begin(*arguments, **keywords)

    served.runtime.invoker.begin = begin_and_kill
    with pytest.raises(FunctionError, match="the supervisor is gone"):
        tokens_of(served.model)
    os.kill(pids[0], signal.SIGCONT)
    wait_until(lambda: all_ended(pids))
    for call in (served.client.report, lambda: tokens_of(served.model)):
        with pytest.raises(FunctionError, match="the supervisor is gone"):
            call()
    served.close()


def test_closing_ends_all_processes_and_removes_the_socket(
    serve, reference, wait_until, all_ended
):
    served = serve(reference[0])
    pids = [served.runtime.supervisor.process.pid, *served.worker_pids()]
    path = Path(served.runtime.supervisor.socket_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    served.close()
    assert not path.parent.exists()
    wait_until(lambda: all_ended(pids))
