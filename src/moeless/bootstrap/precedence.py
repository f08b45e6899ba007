"""The supervisor goes before those that compute, and may not make them wait for long.

It thinks for a fraction of a millisecond while others compute for milliseconds, and a plan that
comes late is of no use. A higher nice value is not enough: where the system groups processes by
session, nice values of different sessions are not compared, and even within one session whoever
wakes may have to wait for the end of a time slice. So it asks for the lowest real-time priority.
"""

import contextlib
import os
import resource
import signal
import types

_LONGEST_TURN_S = 0.02
"""What thinks for longer without a pause stands in line with all others."""
_STAND_BACK_S = 1.0
"""For how long, before it may go first again."""
_NICE = -5


def take_precedence() -> None:
    """Have this thread run before those that compute, where the system allows it.

    Threads and processes that it starts have the usual priority. The main thread calls it, whose
    handlers of SIGXCPU and SIGALRM it takes. Where real-time priority is not allowed, nice -5 is
    tried; where that is not allowed either, nothing happens.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    hard_us = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    if hard_us != resource.RLIM_INFINITY:
        return  # who goes beyond that is killed
    signal.signal(signal.SIGXCPU, _stand_back)
    signal.signal(signal.SIGALRM, _go_first)
    _go_first()


def _go_first(signum: int = 0, frame: types.FrameType | None = None) -> None:
    del signum, frame
    lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, lowest)
        # Again each time: the system raises it when it is exceeded.
        limits = (int(_LONGEST_TURN_S * 1e6), resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_RTTIME, limits)


def _stand_back(signum: int, frame: types.FrameType | None) -> None:
    del signum, frame
    os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    signal.setitimer(signal.ITIMER_REAL, _STAND_BACK_S)
