"""One worker process as the supervisor sees it: start, orders, end. A ``HostPort``."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from moeless.core.model import FunctionId
from moeless.functions.messages import Message, send
from moeless.functions.pulse import Pulse, create_region
from moeless.functions.supervisor.config import WorkerConfig

_log = logging.getLogger(__name__)
_ANSWERED = frozenset({"model", "load", "evict", "attach"})
"""Orders that a worker answers, in the order in which it got them."""
_KILL_TIMEOUT_S = 2.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerProcess:
    """A worker that has been started.

    Args:
        device: Device index.
        config: How to run it.
        generation: How many workers the device has had before.
        digests: Of functions' weights when they were first loaded; kept by the owner.
    """

    def __init__(
        self,
        device: int,
        config: WorkerConfig,
        *,
        generation: int,
        digests: Mapping[FunctionId, str],
    ) -> None:
        self._digests = digests
        self.device = device
        self.generation = generation
        self.ready = False
        self.peak_bytes = 0  # the most its instances have held, by its own count
        self.open_orders = 0
        self.stirred_s = 0.0  # when it last answered an order, or got one while it had none
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection = ours
        environment = dict(os.environ)
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(config.threads))
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads must not take the engine's core
        # Weights that are laid out anew go to fresh memory, which in small pages costs more than
        # laying them out. glibc asks for large ones where the system gives them.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        command = [sys.executable, "-m", "moeless.functions.worker"]
        command += ["--socket-fd", str(theirs.fileno()), "--device", config.torch_device]
        command += ["--threads", str(config.threads), "--spin-us", str(config.spin_us)]
        command += ["--cores", ",".join(map(str, config.cores))]
        pulse_fd = create_region()
        command += ["--pulse-fd", str(pulse_fd)]
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            env=environment,
            pass_fds=[theirs.fileno(), pulse_fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.pulse = Pulse(pulse_fd)
        os.close(pulse_fd)

    def order(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        """Send an order; a worker that is gone is noticed elsewhere, by its closed connection."""
        if message["op"] in _ANSWERED:
            if not self.open_orders:
                self.stirred_s = time.monotonic()
            self.open_orders += 1
        with contextlib.suppress(OSError):
            send(self.connection, message, fds=fds)

    def note_answer(self) -> None:
        """An order has been answered."""
        self.open_orders -= 1
        self.stirred_s = time.monotonic()

    def load(self, function: FunctionId) -> None:
        """Begin to load."""
        digest = self._digests.get(function)
        self.order({"op": "load", "function": function, "digest": digest})

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict."""
        self.order({"op": "evict", "function": function, "reason": reason})

    def kill(self) -> None:
        """End it now; nothing it holds needs saving.

        A process that hangs in the kernel (a disk that does not answer) ends only when the kernel
        lets it go, but runs nothing of its own any more: it is not waited for.
        """
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        try:
            self.process.wait(timeout=_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("worker %d does not end although killed", self.process.pid)
        self.pulse.close()
        with contextlib.suppress(OSError):
            self.connection.close()
