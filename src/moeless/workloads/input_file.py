"""Inputs: whether one is a file that can be opened, and a file for what is none."""

import bz2
import gzip
import lzma
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

from moeless.errors import TraceError, os_reason

MAX_COPY_BYTES: Final = 4 * 2**30
"""What is piped or compressed may not be larger: it takes as much of the temporary folder."""

_CHUNK_BYTES: Final = 2**20
_OPENERS: Final[dict[bytes, Callable[[Path], Any]]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


def require_file(path: Path, wanted: str) -> None:
    """Check that a path names a regular file.

    A pipe or device would block or never end, so they are refused too.

    Args:
        path: The input.
        wanted: What to name instead, for example ``an .npz file``.

    Raises:
        TraceError: It does not.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file; name {wanted}") from error
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else error
        raise TraceError(f"{path}: cannot be opened ({reason}); name {wanted}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise TraceError(f"{path}: is {kind}; name {wanted}")


@contextmanager
def as_file(path: Path) -> Iterator[Path]:
    """Give a file that can be read more than once: what comes through a pipe is copied to one.

    ``-`` is standard input. What is compressed (gzip, bzip2, xz) is decompressed. Directories,
    plain files and names of nothing are given as they are.

    Args:
        path: The input.

    Raises:
        TraceError: What is compressed is damaged, or the input is larger than ``MAX_COPY_BYTES``;
            a ``TraceError`` of the block has the input's name in place of the copy's.
    """
    name = "stdin" if str(path) == "-" else path.name
    name = "pipe" if name.isdigit() else name  # a shell's <(...) is /dev/fd/63
    with ExitStack() as held:
        try:
            plain = _make_plain(path, name, held)
        except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
            reason = os_reason(error) if isinstance(error, OSError) else error
            raise TraceError(f"{name}: cannot be read ({reason}); copy it again") from error
        try:
            yield plain
        except TraceError as error:
            if plain is path:
                raise
            raise TraceError(str(error).replace(str(plain), name)) from error


def _make_plain(path: Path, name: str, held: ExitStack) -> Path:
    """The path itself, or that of a copy that goes when ``held`` is closed."""

    def copy(stream: IO[bytes]) -> Path:
        return _copy(stream, Path(held.enter_context(TemporaryDirectory(prefix="moeless-")), name))

    plain = path
    if str(path) == "-":
        plain = copy(sys.stdin.buffer)
    elif path.is_fifo():
        plain = copy(held.enter_context(path.open("rb")))
    head = b""
    if plain.is_file():
        with suppress(PermissionError), plain.open("rb") as file:  # who reads it will say so
            head = file.read(6)
    for mark, opener in _OPENERS.items():
        if head.startswith(mark):
            return copy(held.enter_context(opener(plain)))
    return plain


def _copy(stream: IO[bytes], target: Path) -> Path:
    left = MAX_COPY_BYTES
    with target.open("wb") as file:
        while chunk := stream.read(min(left + 1, _CHUNK_BYTES)):
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"more than {MAX_COPY_BYTES >> 30} GiB")
            file.write(chunk)
    return target
