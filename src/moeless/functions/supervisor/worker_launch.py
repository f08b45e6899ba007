"""A worker process from outside: its start, its connection, its pulse and its end."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from moeless.errors import FunctionError
from moeless.functions.links.messages import close_all, receive, send
from moeless.functions.links.pulse import Pulse, create_region
from moeless.functions.supervisor.config import WorkerConfig

_log = logging.getLogger(__name__)
_KILL_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 0.1
"""From closing its connection, which the system does for it, to the end of a process."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class WorkerLaunch:
    """A process that was started to be a worker, now or later.

    Args:
        process: It.
        connection: Our end of its socket.
        pulse: Where it shows that it lives.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    pulse: Pulse

    def has_reported(self) -> bool:
        """Take the one message of a spare worker, which says that it can be put to work.

        Raises:
            FunctionError: It has ended.
        """
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        if not poller.poll(0):
            return False
        try:
            received = receive(self.connection)
        except OSError as error:
            raise FunctionError("a spare worker ended") from error
        if received is None:
            raise FunctionError("a spare worker ended")
        close_all(received[1])
        return True

    def put_to_work(self, config: WorkerConfig) -> None:
        """Make a spare worker a device's."""
        order = {"op": "begin", "device": config.torch_device, "cores": list(config.cores)}
        with contextlib.suppress(OSError):  # that it is gone is noticed by its connection
            send(self.connection, order)

    def describe_end(self) -> str:
        """How a process ended whose connection is closed, for a log."""
        try:
            code = self.process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "hung up"
        if code >= 0:
            return f"ended with code {code}"
        return f"ended by signal {-code} ({signal.strsignal(-code)})"

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


def launch_worker(config: WorkerConfig, *, spare: bool = False) -> WorkerLaunch:
    """Start a process.

    Args:
        config: How to run it.
        spare: It gets ready without being in anybody's way, reports, and waits to be put to work.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = dict(os.environ)
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(config.threads))
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads must not take the engine's core
    # Weights that are laid out anew go to fresh memory, which in small pages costs more than
    # laying them out. glibc asks for large ones where the system gives them.
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    command = [sys.executable, "-m", "moeless.functions.worker"]
    command += ["--socket-fd", str(theirs.fileno()), "--device", config.torch_device]
    command += ["--threads", str(config.threads), "--spin-us", str(config.spin_us)]
    command += ["--spare"] if spare else ["--cores", ",".join(map(str, config.cores))]
    pulse_fd = create_region()
    command += ["--pulse-fd", str(pulse_fd)]
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command,
        env=environment,
        pass_fds=[theirs.fileno(), pulse_fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    pulse = Pulse(pulse_fd)
    os.close(pulse_fd)
    return WorkerLaunch(process=process, connection=ours, pulse=pulse)
