"""A real server in a process group of its own, and the processes below it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

WORKER = "moeless.functions.worker"
SPARE_NAME = "moeless-spare"


class Server:
    """`moeless serve` with workers, and float32 experts, so that answers can be compared.

    Args:
        model: As ``serve`` takes it.
        options: Further options of ``serve``.
        log: Receives what it says.
    """

    def __init__(self, model: str, options: list[str], log: Path) -> None:
        command = [sys.executable, "-m", "moeless", "serve", model, "--port", "0"]
        command += ["--dtype", "float32", "--invoker", "process", *options]
        self._log = log.open("w")
        # The pool's sockets are in a folder of our own, so that it is not taken for another one.
        self._folder = Path(tempfile.mkdtemp(prefix="moe-"))
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ | {"XDG_RUNTIME_DIR": str(self._folder)},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "serving " in line:
                self.url = line.split(" on ", 1)[1].split(" ", 1)[0]
                return
        raise SystemExit(f"the server ended before it was ready; see {log}")

    def family(self) -> list[psutil.Process]:
        """Engine, supervisor, workers and spare workers."""
        engine = psutil.Process(self.process.pid)
        return [engine, *engine.children(recursive=True)]

    def roles(self) -> dict[int, str]:
        """What each process is: engine, supervisor, worker or spare."""
        found = {}
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = self._role(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """The workers that devices have now; spare ones do not count."""
        roles = self.roles()
        return [p for p in self.family() if roles.get(p.pid) == "worker"]

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "engine"
        if WORKER not in process.cmdline():
            return "supervisor"
        return "spare" if process.name() == SPARE_NAME else "worker"

    @property
    def pool(self) -> Path:
        """The directory of its pool's sockets."""
        (found,) = self._folder.iterdir()
        return found

    async def run(self, *arguments: str) -> str | None:
        """A command of ours about this server's pool; None if it failed, with its error shown."""
        command = [sys.executable, "-m", "moeless", *arguments, "--pool", str(self.pool)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        told, error = await process.communicate()
        if process.returncode:
            lines = error.decode().strip().splitlines()
            print(f"{' '.join(arguments)}: {lines[-1] if lines else 'failed'}", file=sys.stderr)
            return None
        return told.decode()

    async def list_devices(self) -> list[dict[str, Any]]:
        """The devices, as ``moeless devices list`` has them; empty where there is no answer."""
        found = await self.run("devices", "list", "--json")
        return json.loads(found) if found is not None else []

    def stop(self) -> tuple[float, int]:
        """End it as an operator would.

        Returns:
            The seconds that took, and how many of its processes were left and had to be killed.
        """
        family, began_s = self.family(), time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        seconds = time.monotonic() - began_s
        _, left = psutil.wait_procs(family, timeout=3)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return seconds, len(left)
