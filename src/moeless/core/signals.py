"""How a process ends when the system asks it to: SIGTERM unwinds it, then ends it.

Whenever the signal comes, also before Python has run a line, those who wait for the process see
the same end: by SIGTERM, which shells show as 143.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM
"""What commands return when SIGTERM has ended them, cleaned up."""


def unwind_on_sigterm() -> None:
    """Have SIGTERM raise ``SystemExit(TERMINATED)`` in the main thread, so that blocks clean up.

    Whoever ends in peace when the signal comes returns ``TERMINATED``, too.
    """
    signal.signal(signal.SIGTERM, _unwind)


def _unwind(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Turn a ``SystemExit(TERMINATED)`` out of the block into an end by SIGTERM.

    That is the last thing that happens: what others have registered for the end runs before.
    """
    ended: list[bool] = []
    atexit.register(lambda: _end_by(signal.SIGTERM) if ended else None)
    try:
        yield
    except SystemExit as error:
        if error.code == TERMINATED:
            ended.append(True)
        raise


def _end_by(number: signal.Signals) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Have SIGINT and SIGTERM arrive after the block, which must be short.

    For what must not be left half done, or would lose what a handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda which, _: arrived.append(which))
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(signal.getsignal(number))  # the others do not raise
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for first in arrived[:1]:
            signal.raise_signal(first)
