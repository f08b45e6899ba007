"""How the loops of this package are compiled."""

from collections.abc import Callable
from typing import Any

from numba import njit

from moeless.core.signals import signals_later


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
        # The compiler calls back into Python: what is raised there, as by Ctrl-C, is lost.
        with signals_later():
            try:
                return njit(signature, cache=True, nogil=True, **options)(function)
            except RuntimeError:  # no folder for the cache
                return njit(signature, nogil=True, **options)(function)

    return decorate
