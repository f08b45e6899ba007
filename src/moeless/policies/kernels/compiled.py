"""How the loops of this package are compiled."""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import cfunc, njit

from moeless.core.signals import signals_later

_log = logging.getLogger(__name__)


def compiled(signature: str, *, reorders_sums: bool = False) -> Callable[[Any], Any]:
    """Compile a function when it is defined; it runs without the GIL.

    Machine code is cached beside the source, or in the user's cache folder where that cannot be
    written, or in a folder of our own among temporary files; where none can, it is made anew in
    every process.

    Args:
        signature: Its types, as numba writes them.
        reorders_sums: Floats may be added in another order and multiplied and added in one step,
            as matrix products do, so that the compiler can use vector instructions.
    """
    options: dict[str, Any] = {"fastmath": {"reassoc", "contract"}} if reorders_sums else {}

    def decorate(function: Any) -> Any:
        return _compile_kept(njit, signature, function, nogil=True, **options)

    return decorate


def compiled_callback(signature: Any, function: Any) -> Any:
    """Compile a function that other code may call by its address; cached as ``compiled`` does.

    Args:
        signature: Its types, as numba has them.
        function: A Python function.
    """
    return _compile_kept(cfunc, signature, function)


def _compile_kept(compiler: Any, signature: Any, function: Any, **options: Any) -> Any:
    # The compiler calls back into Python: what is raised there, as by Ctrl-C, is lost.
    with signals_later():
        with contextlib.suppress(RuntimeError):  # no folder for the cache
            return compiler(signature, cache=True, **options)(function)
        if _choose_folder():
            with contextlib.suppress(RuntimeError):
                return compiler(signature, cache=True, **options)(function)
        return compiler(signature, **options)(function)


def _choose_folder() -> bool:
    """Have code cached in a folder of our own; whether there is one.

    What lies there is run: nobody else may have made it, nor be able to write to it.
    """
    config: Any = numba.config
    with contextlib.suppress(OSError):
        if config.CACHE_DIR:
            raise PermissionError(config.CACHE_DIR)  # somebody has chosen one, it is of no use
        folder = Path(tempfile.gettempdir()) / f"moeless-compiled-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        others_write = found.st_mode & 0o022
        if is_ours and not others_write and os.access(folder, os.W_OK | os.X_OK):
            config.CACHE_DIR = str(folder)
            return True
    _say_once()
    return False


@cache
def _say_once() -> None:
    _log.warning(
        "compiled loops cannot be kept anywhere, so every process compiles them for some seconds; "
        "set NUMBA_CACHE_DIR to a folder of yours that can be written"
    )
