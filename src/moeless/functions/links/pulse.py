"""A worker's pulse: when it last showed that it lives, in shared memory.

A stopped or frozen process writes nothing; a busy one does, since its pulse beats in a thread of
its own and computing and reading let other threads run. Clock: the system's monotonic one, which
all processes of a machine share.
"""

import mmap
import struct
import threading
import time

from moeless.functions.links import shared_memory

_BEAT_S = 0.1
_NUM_BYTES = mmap.PAGESIZE


class Pulse:
    """Views of one worker's pulse.

    Args:
        fd: The region; may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._region = shared_memory.attach(fd)

    def beat(self) -> None:
        """Show that we live."""
        struct.pack_into("<q", self._region, 0, time.monotonic_ns())

    def last_s(self) -> float:
        """When the worker last showed that it lives; 0 before the first time."""
        return float(struct.unpack_from("<q", self._region, 0)[0]) / 1e9

    def close(self) -> None:
        """Give the region back."""
        self._region.close()


def create_region() -> int:
    """A descriptor of a region for one pulse."""
    return shared_memory.create("moeless-pulse", _NUM_BYTES)


def start_beating(fd: int) -> None:
    """Beat from a thread of our own until the process ends."""
    pulse = Pulse(fd)
    pulse.beat()
    pause = threading.Event()

    def beat() -> None:
        while True:
            pulse.beat()
            pause.wait(_BEAT_S)

    threading.Thread(target=beat, name="pulse", daemon=True).start()
