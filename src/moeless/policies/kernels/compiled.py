"""How the loops of this package are compiled."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(signature: str) -> Callable[[Any], Any]:
    """Compile a function when it is defined; it runs without the GIL.

    Machine code is cached beside the source, or in the user's cache folder where that cannot be
    written; where neither can, it is made anew in every process.

    Args:
        signature: Its types, as numba writes them.
    """

    def decorate(function: Any) -> Any:
        try:
            return njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # no folder for the cache
            return njit(signature, nogil=True)(function)

    return decorate
