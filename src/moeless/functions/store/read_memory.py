"""Memory that experts are read into on their way to where they stay.

Fresh memory costs a page fault per 4 KiB, which took four to eight times as long as copying the
bytes (measured, see docs/log.md). A device that lays weights out anew, or copies them to a GPU,
needs what was read for a moment only: it reads every expert into the same block. Needs torch.
"""

import math
import mmap

import torch

_ALIGNMENT = 64
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # not known on every system
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ReadMemory:
    """One block that grows to what the largest expert needs. For one thread at a time."""

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._used = 0
        self._needed = 0

    @property
    def needed_bytes(self) -> int:
        """What has been taken since ``begin``, in the block or beside it."""
        return self._needed

    def begin(self) -> None:
        """Whatever was taken before is given up."""
        if self._needed > (0 if self._block is None else len(self._block)):
            self._block = _map(self._needed)
        self._used = self._needed = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with unknown contents, valid until the next ``begin``.

        Tensors taken one after the other lie one behind the other where the block is large enough,
        as it is from the second expert of a size on.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, end = self._used, self._used + num_bytes
        self._needed += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._block is None or end > len(self._block) or not num_bytes:
            return torch.empty(shape, dtype=dtype)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._block[begin:end].view(dtype).view(shape)

    def release(self) -> None:
        """Give the block back to the system; nothing may be using it."""
        self._block = None
        self._used = self._needed = 0


def _map(num_bytes: int) -> torch.Tensor | None:
    """A fresh block; None where there is no memory for it: what is taken then says so itself."""
    try:
        region = mmap.mmap(-1, num_bytes, flags=_PRIVATE)
    except OSError:
        return None
    if _HUGE_PAGES is not None:
        region.madvise(_HUGE_PAGES)
    return torch.frombuffer(region, dtype=torch.uint8)
