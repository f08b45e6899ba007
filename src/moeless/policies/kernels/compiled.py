"""How the loops of this package are compiled."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from numba import cfunc, njit


def compiled(signature: str, *, reorders_sums: bool = False) -> Callable[[Any], Any]:
    """Compile a function when it is defined; it runs without the GIL.

    Machine code is cached beside the source, or in the user's cache folder where that cannot be
    written; where neither can, it is made anew in every process.

    Args:
        signature: Its types, as numba writes them.
        reorders_sums: Floats may be added in another order and multiplied and added in one step,
            as matrix products do, so that the compiler can use vector instructions.
    """
    options: dict[str, Any] = {"fastmath": {"reassoc", "contract"}} if reorders_sums else {}

    def decorate(function: Any) -> Any:
        with _signals_later():
            try:
                return njit(signature, cache=True, nogil=True, **options)(function)
            except RuntimeError:  # no folder for the cache
                return njit(signature, nogil=True, **options)(function)

    return decorate


def compiled_callback(signature: Any, function: Any) -> Any:
    """Compile a function that other code may call by its address; cached as ``compiled`` does.

    Args:
        signature: Its types, as numba has them.
        function: A Python function.
    """
    with _signals_later():
        try:
            return cfunc(signature, cache=True)(function)
        except RuntimeError:  # no folder for the cache
            return cfunc(signature)(function)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Have SIGINT and SIGTERM arrive after the block, which takes a second or two.

    The compiler calls back into Python: what is raised there, as by Ctrl-C, is printed and lost.
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
        for number in arrived[:1]:
            signal.raise_signal(number)
