"""Memory for intermediate rows, kept from one invocation to the next.

A fresh block of some megabytes may cost a page fault per 4 KiB each time; the same block again is
still in the cache. Needs torch.
"""

import math

import torch

_KEPT_BYTES = 16 << 20
"""Larger blocks are not kept: they are rare, and their arithmetic outweighs their page faults."""


class Workspace:
    """Blocks by name. For one thread at a time; a block is valid until its name is taken again."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a CPU tensor with unknown contents.

        Args:
            name: Which block.
            shape: Of the result.
            dtype: Of the result.
        """
        size = math.prod(shape)
        key = (name, dtype)
        block = self._blocks.get(key)
        if block is None or block.numel() < size:
            kept = _KEPT_BYTES // dtype.itemsize
            if size > kept:
                return torch.empty(shape, dtype=dtype)
            # A quarter more than needed, so that slowly growing batches do not grow it each time.
            block = self._blocks[key] = torch.empty(min(size + size // 4, kept), dtype=dtype)
        return block[:size].view(shape)
