"""Threads that work beside the one that computes. Needs torch.

A thread that runs a parallel region of its own gets helpers of its own. Once a process has more of
them than there are cores, GNU's OpenMP lets idle helpers sleep at once instead of spinning for a
moment, and every parallel region of every thread begins by waking them: products of a few rows
took three to five times as long (measured, see docs/log.md).
"""

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

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


def run_in_team(function: int, argument: int, threads: int) -> None:
    """Have threads call a function at the same time, and wait until all have returned.

    They are the ones that torch computes with when it is called from this thread. Where they cannot
    be reached this thread calls the function alone.

    Args:
        function: Address of a compiled ``void(void *)``.
        argument: What each of them hands to it, an address.
        threads: How many.
    """
    team = _team() if threads > 1 else None
    if team is None:
        _call(function)(argument)
    else:
        team(function, argument, threads, 0)


@cache
def _call(function: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


@cache
def _team() -> Any:
    """OpenMP's way to begin a parallel region, from the library that torch has loaded."""
    try:
        with Path("/proc/self/maps").open() as maps:
            files = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    except OSError:
        return None
    for file in sorted(files):
        if Path(file).name.startswith(("libgomp", "libomp", "libiomp")):
            begin: Any = getattr(ctypes.CDLL(file), "GOMP_parallel", None)
            if begin is not None:
                begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                begin.restype = None
                return begin
    return None
