"""A worker's pulse: when it last showed that it lives, and whom it serves, in shared memory.

A stopped or frozen process writes nothing; a busy one does, since its pulse beats in a thread of
its own and computing and reading let other threads run. Clock: the system's monotonic one, which
all processes of a machine share.

Each word is written by one thread, whole: a reader sees what was written before or after, never
half of it. No word says anything about other memory, so no order between them matters.
"""

import mmap
import threading
import time

from moeless.functions.links import shared_memory

_BEAT_S = 0.1
_NUM_BYTES = mmap.PAGESIZE
_ENGINES = 1 << 16
"""Engines that are told apart; beside their number milliseconds fit for longer than machines run.
"""


class Pulse:
    """Views of one worker's pulse.

    Args:
        fd: The region; may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._region = shared_memory.attach(fd)
        self._words = memoryview(self._region).cast("q")

    def beat(self) -> None:
        """Show that we live."""
        self._words[0] = time.monotonic_ns()

    def last_s(self) -> float:
        """When the worker last showed that it lives; 0 before the first time."""
        return float(self._words[0]) / 1e9

    def serve(self, engine: int | None) -> None:
        """Note that from now on we compute for an engine, or for none.

        Args:
            engine: Its number, from 0.
        """
        mark = 0 if engine is None else _mark(engine)
        self._words[1] = time.monotonic_ns() // 1_000_000 * _ENGINES + mark

    def serves(self, engine: int) -> bool:
        """Whether the worker computes for an engine, or for none, so that it could."""
        return self._words[1] % _ENGINES in (0, _mark(engine))

    def serving_since_s(self) -> float:
        """Since when it has computed for whom it computes for now, or for nobody."""
        return float(self._words[1] // _ENGINES) / 1e3

    def close(self) -> None:
        """Give the region back."""
        self._words.release()
        self._region.close()


def _mark(engine: int) -> int:
    return 1 + engine % (_ENGINES - 1)


def create_region() -> int:
    """A descriptor of a region for one pulse."""
    return shared_memory.create("moeless-pulse", _NUM_BYTES)


def start_beating(fd: int) -> Pulse:
    """Beat from a thread of our own until the process ends; returns the pulse."""
    pulse = Pulse(fd)
    pulse.beat()
    pause = threading.Event()

    def beat() -> None:
        while True:
            pulse.beat()
            pause.wait(_BEAT_S)

    threading.Thread(target=beat, name="pulse", daemon=True).start()
    return pulse
