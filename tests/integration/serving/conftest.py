"""A real ``moeless serve``: its own process, its supervisor, two workers, a tiny random model."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from effort import PATIENCE_S
from families import make_tiny, make_tokenizer

ENDS_BY = {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 0}
"""How one ends that serves, by the signal that it was sent."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("serving") / "tiny-granite"
    make_tiny("granitemoeshared").save_pretrained(directory)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


class ServeProcess:
    """``moeless serve`` and everything it started."""

    def __init__(self, model: Path, *options: str, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        environment = dict(os.environ, XDG_RUNTIME_DIR=str(runtime_dir), OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", "moeless", "serve", str(model), "--port", "0", *options]
        if not {"--pool", "--invoker"} & set(options):
            command += ["--invoker", "process"]  # what starts the most that has to end
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._watchdog = threading.Timer(PATIENCE_S, self.process.kill)
        self._watchdog.start()
        self.url = ""
        for line in self.process.stdout:
            if "serving" in line:
                self.url = line.split(" on ", 1)[1].split(" ", 1)[0]
                break
        self._watchdog.cancel()
        assert self.url, self.process.stderr.read()
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns 0 if it ended as it should, else the exit code."""
        self.process.send_signal(sign)
        code = self.process.wait(timeout=PATIENCE_S)
        code = 0 if code == ENDS_BY.get(sign) else code
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def left_behind(self) -> list[psutil.Process]:
        """Processes that it started and that do not end."""
        return psutil.wait_procs(self.family, timeout=PATIENCE_S)[1]


@pytest.fixture
def start_serving(tmp_path):
    """Start servers with options; all are stopped at the end."""
    started = []

    def start(model: Path, *options: str) -> ServeProcess:
        server = ServeProcess(model, *options, runtime_dir=tmp_path)
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def serving(model_dir, tmp_path_factory):
    """One server for the tests that leave it as it was."""
    options = ["--dtype", "float32", "--max-waiting", "400", "--max-model-len", "512"]
    server = ServeProcess(model_dir, *options, runtime_dir=tmp_path_factory.mktemp("runtime"))
    yield server
    server.stop()
