"""One worker process as the supervisor sees it: start, orders, end. A ``HostPort``."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from moeless.core.model import FunctionId
from moeless.functions.messages import Message, send
from moeless.functions.supervisor.config import WorkerConfig

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerProcess:
    """A worker that has been started.

    Args:
        device: Device index.
        config: How to run it.
        generation: How many workers the device has had before.
    """

    def __init__(self, device: int, config: WorkerConfig, *, generation: int) -> None:
        self.device = device
        self.generation = generation
        self.ready = False
        self.peak_bytes = 0  # the most its instances have held, by its own count
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection = ours
        environment = dict(os.environ)
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(config.threads))
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads must not take the engine's core
        command = [sys.executable, "-m", "moeless.functions.worker"]
        command += ["--socket-fd", str(theirs.fileno()), "--device", config.torch_device]
        command += ["--threads", str(config.threads), "--spin-us", str(config.spin_us)]
        command += ["--cores", ",".join(map(str, config.cores))]
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def order(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        """Send an order; a worker that is gone is noticed elsewhere, by its closed connection."""
        with contextlib.suppress(OSError):
            send(self.connection, message, fds=fds)

    def load(self, function: FunctionId) -> None:
        """Begin to load."""
        self.order({"op": "load", "function": function})

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict."""
        self.order({"op": "evict", "function": function, "reason": reason})

    def kill(self) -> None:
        """End it now; nothing it holds needs saving."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self.connection.close()
