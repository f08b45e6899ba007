"""A worker without a device: it gets ready in nobody's way, then waits to be put to work."""

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from moeless.functions.links.messages import close_all, receive, send

NAME = "moeless-spare"
"""What process lists show while it waits; at most 15 bytes."""
_LOWEST_PRIORITY = 19
_PR_SET_NAME = 15


def stand_by(connection: socket.socket) -> tuple[str, tuple[int, ...]] | None:
    """Get ready and wait.

    Args:
        connection: To the supervisor, who is told when we are ready.

    Returns:
        The torch device to work for and the cores to stay on; None if nobody needs us any more.
    """
    _set_name(NAME)
    # A thread's low priority ends with the thread; a process could not take its own back.
    loader = threading.Thread(target=_load_libraries, name="libraries")
    loader.start()
    loader.join()
    message = None
    with contextlib.suppress(OSError):
        send(connection, {"op": "spare", "pid": os.getpid()})
        received = receive(connection)
        if received is not None:
            message, fds = received
            close_all(fds)
    if message is None:
        return None
    _set_name("moeless-worker")
    return str(message["device"]), tuple(message["cores"])


def move_to(cores: Sequence[int]) -> None:
    """Have all threads stay on some cores; none leaves it to the system."""
    if cores:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), set(cores))


def _load_libraries() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    import moeless.functions.worker.worker  # noqa: F401 - with torch, which takes the time


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
