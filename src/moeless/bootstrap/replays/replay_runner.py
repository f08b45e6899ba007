"""Runs the policies of a replay, each in a process of its own, several at a time."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from moeless.bootstrap.policies import is_serverful
from moeless.bootstrap.replays import replay_process
from moeless.bootstrap.replays.replay import PreparedReplay
from moeless.core.signals import signals_later
from moeless.errors import ConfigError, FunctionError
from moeless.simulator.metrics import MetricsConfig
from moeless.simulator.recording import Recording
from moeless.workloads.routing_trace import write_trace

Progress = Callable[[str, int], None]
"""Told a policy's name and the steps that it has done."""


def run_replay(
    prepared: PreparedReplay, *, jobs: int = 2, progress: Progress = lambda _name, _steps: None
) -> dict[str, Recording]:
    """Replay every policy.

    Args:
        prepared: What to replay.
        jobs: Processes at a time.
        progress: Told how far each policy is.

    Returns:
        Policy to recording, in the order asked for.

    Raises:
        MoelessError: A policy cannot be built or run; the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="moeless-replay-") as directory, ExitStack() as stack:
        folder = Path(directory)
        trace_path = folder / "trace.npz"
        write_trace(prepared.trace, trace_path)
        waiting = list(prepared.task.policies)
        running: dict[str, _Worker] = {}
        recordings: dict[str, Recording] = {}
        selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(_kill_all, running)
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                with signals_later():  # a new process must be known to be ended
                    running[name] = worker = _Worker.start(prepared, name, trace_path, folder)
                selector.register(worker.output, selectors.EVENT_READ, name)
            for key, _ in selector.select():
                name = key.data
                worker = running[name]
                if worker.hear(progress):
                    continue
                selector.unregister(worker.output)
                recordings[name] = worker.finish()
                del running[name]
                progress(name, len(prepared.trace))
        return {name: recordings[name] for name in prepared.task.policies}


def describe_job(prepared: PreparedReplay, name: str) -> dict[str, Any]:
    """What the process of one policy is told, but for the places of its files; JSON."""
    task = prepared.task
    return {
        "policy": name,
        "devices": task.devices,
        "device_bytes": prepared.device_bytes,
        "expert": asdict(prepared.expert),
        "cost_model": task.cost_model,
        "speeds": prepared.time_model.cost.speeds,
        "load_s": prepared.load_s,
        "prediction": asdict(prepared.prediction),
        "seed": task.seed,
        "options": asdict(task.options),
        "keep_alive_s": task.keep_alive_s,
        "keep_alive_rule": task.keep_alive_rule,
        "decision_s": task.decision_s,
        "search_s": task.search_s,
        "misc_s": task.misc_s,
        "keep_replicas": task.keep_replicas,
        "samples": prepared.samples,
        "explain": task.explain,
    }


def _kill_all(workers: dict[str, "_Worker"]) -> None:
    for worker in workers.values():
        worker.kill()


def metrics_config(prepared: PreparedReplay, policy: str) -> MetricsConfig:
    """What a policy's figures depend on besides its recording."""
    return MetricsConfig(
        cost=prepared.time_model.cost,
        num_devices=prepared.task.devices,
        device_bytes=prepared.device_bytes,
        function_bytes=prepared.expert.num_bytes,
        serverless=not is_serverful(policy),
        misc_bytes=prepared.task.misc_bytes,
    )


@dataclass(kw_only=True)
class _Worker:
    """One policy's process."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: Path
    result: Path
    pending: bytes = b""
    failure: dict[str, Any] | None = field(default=None)

    @classmethod
    def start(
        cls, prepared: PreparedReplay, name: str, trace_path: Path, folder: Path
    ) -> "_Worker":
        number = prepared.task.policies.index(name)
        job_path = folder / f"{number}.json"
        errors, result = folder / f"{number}.err", folder / f"{number}.npz"
        job = describe_job(prepared, name) | {"trace": str(trace_path), "result": str(result)}
        job_path.write_text(json.dumps(job), encoding="utf-8")
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        with errors.open("wb") as error_file:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", replay_process.__name__, str(job_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=error_file,
                env=os.environ | one_thread,
            )
        assert process.stdout is not None
        return cls(name=name, process=process, output=process.stdout, errors=errors, result=result)

    def hear(self, progress: Progress) -> bool:
        """Take what it says; False once it has ended."""
        data = os.read(self.output.fileno(), 65536)
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "error" in message:
                self.failure = message
            else:
                progress(self.name, int(message["step"]))
        return bool(data)

    def finish(self) -> Recording:
        """Its recording.

        Raises:
            MoelessError: It failed.
        """
        code = self.process.wait()
        self.output.close()
        if self.failure is not None:
            kind = ConfigError if self.failure["exit_code"] == 2 else FunctionError
            raise kind(f"policy {self.name}: {self.failure['error']}")
        if code != 0:
            said = self.errors.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "no word")
            raise FunctionError(f"policy {self.name}: its process ended with {code}: {last}")
        recording = Recording.load(self.result)
        self.result.unlink()
        return recording

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.output.close()
