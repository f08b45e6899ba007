"""The order in which other processes see what is written to shared memory, and read from it.

Whoever hands something over writes it, then a mark; whoever takes it sees the mark, then reads.
On x86-64 that is enough: stores are seen in the order in which they were made, and neither loads
nor stores move before an earlier load (Intel SDM 3A, 9.2; AMD APM 2, 7.2; copies that go round the
caches end with a fence of their own in the C library). Other processors, ARM's for example, need a
fence between the two on both sides: see ADR 11.
"""

import threading
from collections.abc import Callable

from moeless.core.processor import this_processor

Fence = Callable[[], None]
"""What was loaded and stored before it is so for all, before anything after it."""


def new_fence() -> Fence | None:
    """A fence for one thread; None where the processor keeps the order by itself.

    Cost on the token path: nothing to speak of where there is none, else 0.15 µs a call.
    """
    return None if this_processor().keeps_memory_order else lock_fence()


def lock_fence() -> Fence:
    """A fence of what every processor and every Python has: a lock that nobody else takes.

    Taking a lock keeps what follows behind it, giving it back keeps what went before in front of
    it. One pair lets both slip inside and pass each other there; giving it back and taking it
    again does not.
    """
    lock = threading.Lock()
    take, give_back = lock.acquire, lock.release

    def fence() -> None:
        take()
        give_back()
        take()
        give_back()

    return fence
