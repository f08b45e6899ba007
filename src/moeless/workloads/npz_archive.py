"""Careful reading of ``.npz`` archives: plain arrays only, and sizes known before they are held.

A file from a stranger may be cut, may hold pickles, or may declare arrays far larger than memory.
Knows nothing about what the arrays mean.
"""

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.input_file import require_file

MAX_BYTES: Final = 16 * 2**30
"""Largest sum of the arrays that one file may declare."""

_UNREADABLE: Final = (
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile, zlib and numpy raise on damaged members."""


@dataclass(frozen=True, kw_only=True)
class _Header:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    num_bytes: int


def read_arrays(path: Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read the named arrays that the archive holds; others are ignored.

    Args:
        path: An ``.npz`` file.
        names: Arrays of interest, without ``.npy``.

    Returns:
        Those of them that are there.

    Raises:
        TraceError: The file is missing, is no archive, is damaged, holds a pickle where a named
            array should be, or declares more than ``MAX_BYTES``.
    """
    require_file(path, "an .npz file")
    try:
        archive = zipfile.ZipFile(path)
    except _UNREADABLE as error:
        raise TraceError(
            f"{path}: not a readable .npz archive ({_line(error)}); it may be cut: copy it again"
        ) from error
    with archive:
        present = archive.namelist()
        twice = next((n for n in names if present.count(f"{n}.npy") > 1), None)
        if twice is not None:
            raise TraceError(f"{path}: {twice} is there more than once; write the file again")
        wanted = [name for name in names if f"{name}.npy" in present]
        _check_sizes(path, {name: _read_header(path, archive, name) for name in wanted})
        return {name: _read_array(path, archive, name) for name in wanted}


def _check_sizes(path: Path, headers: dict[str, _Header]) -> None:
    total = 0
    for name, header in headers.items():
        total += header.num_bytes
        if total > MAX_BYTES:
            raise TraceError(
                f"{path}: {name} declares shape {list(header.shape)}, {header.num_bytes} bytes; a "
                f"trace may hold {MAX_BYTES // 2**30} GiB in all: cut it into several files"
            )


def _read_header(path: Path, archive: zipfile.ZipFile, name: str) -> _Header:
    member = f"{name}.npy"
    try:
        with archive.open(member) as file:
            dtype, shape = _parse_header(file)
            offset = file.tell()
    except (*_UNREADABLE, MemoryError) as error:
        raise TraceError(f"{path}: {name} is not a readable array ({_line(error)})") from error
    if dtype.hasobject:
        raise TraceError(
            f"{path}: {name} holds Python objects (a pickle), which are never loaded; save plain "
            f"numbers or text"
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    stored = archive.getinfo(member).file_size - offset
    if any(extent < 0 for extent in shape) or (num_bytes <= MAX_BYTES and stored != num_bytes):
        raise TraceError(
            f"{path}: {name} declares shape {list(shape)} of {dtype}, but {stored} bytes are "
            f"stored; the file is damaged: copy or write it again"
        )
    return _Header(dtype=dtype, shape=shape, num_bytes=num_bytes)


def _parse_header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    version = npy.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(file)
    else:
        raise ValueError(f"array format {version} is not supported")
    return dtype, shape


def _read_array(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    try:
        with archive.open(f"{name}.npy") as file:
            array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
            file.read()  # the checksum is compared at the end of the member
    except MemoryError as error:
        raise TraceError(f"{path}: {name} does not fit into memory; cut the trace") from error
    except _UNREADABLE as error:
        raise TraceError(
            f"{path}: {name} cannot be read ({_line(error)}); the file is damaged: copy it again"
        ) from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
