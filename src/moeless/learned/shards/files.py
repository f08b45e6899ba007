"""Files that are there whole or not at all."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeless.errors import find_os_error

TEMPORARY_SUFFIX = ".partial"
"""Of files in the making; whoever continues a directory removes what is left of them."""

_READ_BYTES = 2**20


@contextmanager
def written_durably(path: Path) -> Iterator[Path]:
    """Give a path to write to; it gets its name once it is on the disk.

    Unlike ``core.whole_file`` it survives a machine that goes down, and what is left of it has a
    name by which it is found.

    Args:
        path: The final name; a file that is there is replaced.

    Raises:
        OSError: It cannot be written, whatever writes it.
    """
    partial = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors would keep files from all other users
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        refused = find_os_error(error)
        if refused is None or refused is error:
            raise
        raise refused from error


def sha256_of(path: Path) -> str:
    """The file's digest, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
