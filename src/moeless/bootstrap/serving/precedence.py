"""The supervisor goes before those that compute, and may not make them wait for long.

It thinks for a fraction of a millisecond while others compute for milliseconds, and a plan that
comes late is of no use. A lower nice value is not enough: where the system groups processes by
session, nice values of different sessions are not compared, and even within one session whoever
wakes may have to wait for the end of a time slice. So it asks for the lowest real-time priority.
"""

import contextlib
import os
import resource
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager

from moeless.core.processor import this_processor

_LONGEST_TURN_S = 0.02
"""What thinks for longer without a pause stands in line with all others."""
_STAND_BACK_S = 1.0
"""For how long, before it may go first again."""
_NICE = -5


@contextmanager
def precedence() -> Iterator[None]:
    """Have this thread run before those that compute, where the system allows it.

    Threads and processes that it starts have the usual priority. The main thread calls it, whose
    handlers of SIGXCPU and SIGALRM it takes meanwhile. Where real-time priority is not allowed,
    nice -5 is tried, and stays; where that is not allowed either, nothing happens.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    hard_us = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    if hard_us != resource.RLIM_INFINITY or not this_processor().may_ask_for_real_time:
        yield  # who goes beyond a hard limit is killed
        return
    turns = _Turns()
    before = {
        signal.SIGXCPU: signal.signal(signal.SIGXCPU, turns.stand_back),
        signal.SIGALRM: signal.signal(signal.SIGALRM, turns.go_first),
    }
    turns.go_first()
    try:
        yield
    finally:
        # A process that ends while it is real-time is killed: the interpreter gives up its
        # handlers before it has cleaned up.
        turns.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Turns:
    """When this thread goes first, and when it stands back."""

    def __init__(self) -> None:
        self._are_over = False

    def go_first(self, signum: int = 0, frame: types.FrameType | None = None) -> None:
        """Have the lowest real-time priority, for turns of limited length."""
        del signum, frame
        if self._are_over:
            return
        lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, lowest)
            # Again each time: the system raises it when it is exceeded.
            limits = (int(_LONGEST_TURN_S * 1e6), resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_RTTIME, limits)

    def stand_back(self, signum: int, frame: types.FrameType | None) -> None:
        """Be an ordinary thread for a while."""
        del signum, frame
        self._be_ordinary()
        if not self._are_over:
            signal.setitimer(signal.ITIMER_REAL, _STAND_BACK_S)

    def end(self) -> None:
        """Be an ordinary thread for good."""
        self._are_over = True
        self._be_ordinary()
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(
            resource.RLIMIT_RTTIME, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )

    def _be_ordinary(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
