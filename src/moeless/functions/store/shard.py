"""One safetensors file: its header, and byte ranges read from it.

Bytes are read with ``pread`` into the caller's memory, not through a mapping: a file that is
truncated while it is read gives a short read and thus an error, where touching a mapping would
end the process with SIGBUS. The page cache serves both alike. Safetensors files carry no
checksum, so bytes that were altered in place cannot be noticed.

This module must not know torch, experts or layouts.
"""

import contextlib
import json
import math
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

from moeless.errors import CheckpointError, os_reason

ITEM_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element by safetensors dtype name; packed types are absent."""

_MAX_HEADER_BYTES = 100_000_000
_MAX_READ_BYTES = 1 << 30
_POINTER = b"version https://git-lfs"
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)  # not known on every system


class TensorEntry(NamedTuple):
    """A tensor as its shard's header describes it.

    ``begin`` is its offset in the file; both offsets and sizes are in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """What a reader relies on: dtype and shape."""
        return self.dtype, self.shape


class _Descriptor:
    """An open file that closes when its last user is done.

    A reader in another thread may hold it while the shard is closed or opened afresh; closing it
    under that reader could hand its number to another file.
    """

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class _Opened(NamedTuple):
    file: _Descriptor
    identity: tuple[int, int, int, int]
    entries: dict[str, TensorEntry]


class Shard:
    """A safetensors file, opened when first needed; safe to use from several threads.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._forms: dict[str, tuple[str, tuple[int, ...]]] = {}  # as they were at first

    def entries(self) -> dict[str, TensorEntry]:
        """All tensors of the shard, as they were when it was last opened.

        Whether the file is still the same is for ``read_into`` to see.

        Raises:
            CheckpointError: The file is missing, or its size or header is wrong.
        """
        opened = self._opened
        return (opened or self._current()).entries

    def read_into(self, key: str, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with consecutive bytes of a tensor.

        Args:
            key: The tensor.
            begin: First byte, counted from the tensor's start.
            buffer: Writable bytes; its length says how many to read.

        Raises:
            CheckpointError: The shard is gone, was truncated or replaced by something else, or
                cannot be read; names the file and the tensor.
        """
        try:
            opened = self._current()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {key}: {error}") from error
        entry = opened.entries.get(key)
        if entry is None or entry.form != self._forms.get(key):
            raise CheckpointError(
                f"tensor {key}: shard {self.path} was replaced by another file; restore it, or "
                f"restart with the new one"
            )
        offset, done = entry.begin + begin, 0
        while done < len(buffer):
            piece = buffer[done : done + _MAX_READ_BYTES]
            try:
                count = os.preadv(opened.file.number, [piece], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"tensor {key}: shard {self.path} cannot be read ({os_reason(error)}); "
                    f"check the disk or download the shard again"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"tensor {key}: shard {self.path} ends at byte {offset + done}, "
                    f"before the tensor does; download the shard again"
                )
            done += count

    def fetch(self, begin: int, end: int, scratch: memoryview) -> None:
        """Have the system hold a range of the file in memory, where it does not yet.

        It is really read: advice to read ahead makes pages of the smallest size, which takes three
        times the processor time and reaches half the speed (measured, see docs/log.md). The file
        is opened anew, so that the system sees one reader that goes forward.

        Args:
            begin: First byte of the range, counted from the start of the file.
            end: End of the range.
            scratch: Overwritten; its length is that of one read.
        """
        with contextlib.suppress(OSError):
            file = _Descriptor(self.path)
            while begin < end:
                piece = scratch[: end - begin]
                if not _is_cached(file.number, begin):
                    os.preadv(file.number, [piece], begin)
                begin += len(piece)

    def expect(self, begin: int, end: int) -> None:
        """A range of the file will be read soon: have the system begin to. Never blocks for long.

        Args:
            begin: First byte of the range, counted from the start of the file.
            end: End of the range.
        """
        opened = self._opened
        if opened is not None:
            with contextlib.suppress(OSError):
                os.posix_fadvise(opened.file.number, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Give the file descriptor back; the next use opens the file again."""
        with self._lock:
            self._opened = None

    def _current(self) -> _Opened:
        """The open file, opened afresh if the path names another file or content by now."""
        with self._lock:
            try:
                identity = _identity(self.path.stat())
                if self._opened is not None and self._opened.identity == identity:
                    return self._opened
                self._opened = None
                file = _Descriptor(self.path)
            except FileNotFoundError as error:
                raise CheckpointError(f"shard {self.path} is missing; download it") from error
            except OSError as error:
                raise CheckpointError(
                    f"shard {self.path} cannot be opened ({os_reason(error)}); check its "
                    f"permissions"
                ) from error
            status = os.fstat(file.number)
            entries = _read_header(self.path, file.number, status.st_size)
            self._opened = _Opened(file, _identity(status), entries)
            if not self._forms:
                self._forms = {key: entry.form for key, entry in entries.items()}
            return self._opened


def refuse_pointer(path: Path) -> None:
    """Refuse what Git leaves in place of a large file that it has not fetched.

    Args:
        path: A file; one that cannot be read is left to whoever reads it.

    Raises:
        CheckpointError: It is such a pointer.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; run git lfs pull there"
            )


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at an offset is in memory already."""
    try:
        return _NO_WAIT != 0 and os.preadv(descriptor, [bytearray(1)], offset, _NO_WAIT) > 0
    except BlockingIOError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(path: Path, descriptor: int, size: int) -> dict[str, TensorEntry]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    refuse_pointer(path)
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"shard {path} is truncated or corrupt: its header says {length} bytes, "
            f"the file has {size}; download it again"
        )
    try:
        described = json.loads(os.pread(descriptor, length, 8))
        described.pop("__metadata__", None)
        entries = {key: _read_entry(value, 8 + length) for key, value in described.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"shard {path} is corrupt: its header is not a safetensors header; download it again"
        ) from error
    end = max((entry.begin + entry.num_bytes for entry in entries.values()), default=8 + length)
    if end != size:
        raise CheckpointError(
            f"shard {path} is truncated or corrupt: its header says {end} bytes, "
            f"the file has {size}; download it again"
        )
    return entries


def _read_entry(value: dict[str, Any], base: int) -> TensorEntry:
    dtype, shape = str(value["dtype"]), tuple(value["shape"])
    begin, end = value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or end < begin:
        raise ValueError("a shape or offset is not a count")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError("shape and offsets disagree")
    return TensorEntry(dtype, shape, base + begin, end - begin)
