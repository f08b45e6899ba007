"""Output files that are there whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path to write to; what it holds gets its name when the block ends without an error.

    A link stays, and what it points to is written. What is no regular file, such as ``/dev/null``
    or a pipe, is written to and never replaced.

    Args:
        path: The final name; a file that is there is replaced.

    Raises:
        OSError: It cannot be written.
    """
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        yield path
        return
    try:
        target = path.resolve()
    except RuntimeError:  # as Python before 3.13 says that links go round in circles
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        with suppress(OSError):  # gone already, unless writing failed
            partial.unlink()
