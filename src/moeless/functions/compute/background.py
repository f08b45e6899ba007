"""Threads that work beside the one that computes. Needs torch.

A thread that runs a parallel region of its own gets helpers of its own. Once a process has more of
them than there are cores, GNU's OpenMP lets idle helpers sleep at once instead of spinning for a
moment, and every parallel region of every thread begins by waking them: products of a few rows
took three to five times as long (measured, see docs/log.md).
"""

import threading

import torch

_PARALLEL_ELEMENTS = 1 << 17
"""More than what torch leaves to one thread."""
_entered = threading.local()


def start_helpers() -> None:
    """Have the threads started that help the main thread compute.

    They would start with the first large product, and OpenMP ends a process that has no memory
    for their stacks then.
    """
    torch.ones(_PARALLEL_ELEMENTS).mul_(2)


def work_in_background() -> None:
    """From now on torch uses no helpers for what this thread does; the main thread stays as it is.

    Cheap to call again.
    """
    if getattr(_entered, "done", False) or threading.current_thread() is threading.main_thread():
        return
    _entered.done = True
    threads = torch.get_num_threads()
    if threads == 1:
        return
    torch.set_num_threads(1)
    # That was for this thread, but also for all that have not asked yet. Another thread takes the
    # latter back.
    restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()
