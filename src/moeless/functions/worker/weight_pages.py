"""Pages of their own for weights, so that an eviction gives its memory back to the system.

glibc serves what is smaller than 32 MiB from its heap once it has seen such sizes come and go, and
a heap keeps what is freed between blocks in use. That is right for activations, which would
otherwise cost a page fault per 4 KiB each time (measured: a third more time for 1024 rows), and
wrong for weights (measured: 300 MB held too much under a budget of 214 MB). So the limit is low
while an expert is loaded and high at all other times.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_WEIGHTS_BYTES = 1 << 20
_ACTIVATIONS_BYTES = 32 << 20
"""Where glibc's own adjustment ends; setting a limit by hand switches that off."""


@contextmanager
def weight_pages() -> Iterator[None]:
    """Serve large blocks that are allocated meanwhile from pages of their own.

    The limit belongs to the process: what other threads allocate meanwhile is served alike.
    """
    _set_limit(_WEIGHTS_BYTES)
    try:
        yield
    finally:
        _set_limit(_ACTIVATIONS_BYTES)


@cache
def _mallopt() -> Callable[[int, int], int] | None:
    function: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return function


def _set_limit(num_bytes: int) -> None:
    mallopt = _mallopt()
    if mallopt is not None:  # not every C library has it
        mallopt(_M_MMAP_THRESHOLD, num_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2 * _ACTIVATIONS_BYTES)
