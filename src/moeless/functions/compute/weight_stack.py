"""The small experts of one layer, side by side in memory, so that one call can run many of them.

A stack is address space for all experts of a layer; only what is written takes memory. An instance
gets the lowest free slot when it is loaded and stays there: neither a load nor an eviction moves
another instance. An eviction gives the slot's pages back to the system. What a free slot reads as
(zeros, or what an instance left on a page that it shared) is never used.

Weights are stored as checkpoints have them, outputs first, or with inputs first, as compiled loops
want them; the views are the same. Needs torch.
"""

import heapq
import math
import mmap
import threading
from dataclasses import dataclass

import torch

from moeless.core.model import DTYPE_BYTES, ExpertShape
from moeless.functions.store.expert_weights import ExpertWeights

_FORGET = getattr(mmap, "MADV_DONTNEED", None)  # these two are not known on every system
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Region:
    """One parameter of all slots, contiguous: rows of slot i begin at i times the slot's size."""

    def __init__(self, slots: int, shape: tuple[int, ...], dtype: str) -> None:
        self._slot_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        try:
            self._memory = mmap.mmap(-1, slots * self._slot_bytes, flags=_PRIVATE)
        except (OSError, ValueError) as error:
            raise MemoryError(f"no address space for {slots} experts: {error}") from error
        if _NO_HUGE_PAGES is not None:
            # A huge page spans many slots, so loading one would take the memory of them all.
            self._memory.madvise(_NO_HUGE_PAGES)
        buffer = torch.frombuffer(self._memory, dtype=getattr(torch, dtype))
        self.tensor = buffer.view(slots, *shape)

    def forget(self, slot: int, used: set[int]) -> None:
        """Give back the pages of a slot that no slot in use shares."""
        if _FORGET is None:
            return
        page, size = mmap.PAGESIZE, self._slot_bytes
        first, last = slot * size // page, -(-(slot + 1) * size // page)
        while first < last and self._shared(first, used):
            first += 1
        while first < last and self._shared(last - 1, used):
            last -= 1
        if first < last:
            end = min(last * page, len(self._memory))
            self._memory.madvise(_FORGET, first * page, end - first * page)

    def _shared(self, page: int, used: set[int]) -> bool:
        size = self._slot_bytes
        first, last = page * mmap.PAGESIZE // size, ((page + 1) * mmap.PAGESIZE - 1) // size
        return any(slot in used for slot in range(first, last + 1))


class WeightStack:
    """Memory for the instances of one layer.

    Args:
        shape: Of each expert.
        slots: How many instances there can be at once.
        input_major: Store projections with inputs first.

    Raises:
        MemoryError: There is no address space for so many.
    """

    def __init__(self, shape: ExpertShape, slots: int, *, input_major: bool = False) -> None:
        hidden, inner, dtype = shape.hidden, shape.intermediate, shape.dtype
        self.is_input_major = input_major
        gate_up, down = (2 * inner, hidden), (hidden, inner)
        self._gate_up = _Region(slots, gate_up[::-1] if input_major else gate_up, dtype)
        self._down = _Region(slots, down[::-1] if input_major else down, dtype)
        self._regions = [self._gate_up, self._down]
        self._gate_up_bias = self._down_bias = None
        if shape.bias:
            self._gate_up_bias = _Region(slots, (2 * inner,), dtype)
            self._down_bias = _Region(slots, (hidden,), dtype)
            self._regions += [self._gate_up_bias, self._down_bias]
        self._free = list(range(slots))
        self._used: set[int] = set()
        # A slot is taken before it is written, and freed only after its pages are gone: so no
        # page is given back that another thread has begun to fill.
        self._changing = threading.Lock()

    @property
    def stored_gate_up(self) -> torch.Tensor:
        """Gate and up projections as they lie in memory, [N, H, 2I] where inputs come first."""
        return self._gate_up.tensor

    @property
    def stored_down(self) -> torch.Tensor:
        """Down projections as they lie in memory, [N, I, H] where inputs come first."""
        return self._down.tensor

    @property
    def gate_up(self) -> torch.Tensor:
        """Gate and up projections side by side, all slots [N, 2I, H]."""
        stored = self._gate_up.tensor
        return stored.transpose(1, 2) if self.is_input_major else stored

    @property
    def down(self) -> torch.Tensor:
        """Down projections, all slots [N, H, I]."""
        stored = self._down.tensor
        return stored.transpose(1, 2) if self.is_input_major else stored

    @property
    def gate_up_bias(self) -> torch.Tensor | None:
        """[N, 2I], or None where the family has no biases."""
        return None if self._gate_up_bias is None else self._gate_up_bias.tensor

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[N, H] or None."""
        return None if self._down_bias is None else self._down_bias.tensor

    def put(self, weights: ExpertWeights) -> "StackSlot":
        """Copy an expert's weights into the lowest free slot.

        Raises:
            MemoryError: All slots are in use.
        """
        with self._changing:
            if not self._free:
                raise MemoryError(f"all {len(self._used)} slots of the layer are in use")
            index = heapq.heappop(self._free)
            self._used.add(index)
        slot = StackSlot(stack=self, index=index)
        try:
            slot.write(weights)
        except BaseException:
            slot.give_back()
            raise
        return slot

    def give_back(self, index: int) -> None:
        """Free a slot and its memory; nothing may be reading it."""
        with self._changing:
            self._used.discard(index)
            for region in self._regions:
                region.forget(index, self._used)
            heapq.heappush(self._free, index)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StackSlot:
    """Where one instance lies.

    Args:
        stack: The layer's stack.
        index: Its slot.
    """

    stack: WeightStack
    index: int

    @property
    def gate_up(self) -> torch.Tensor:
        """Gate and up projection side by side [2I, H]."""
        return self.stack.gate_up[self.index]

    @property
    def down(self) -> torch.Tensor:
        """Down projection [H, I]."""
        return self.stack.down[self.index]

    @property
    def gate_up_bias(self) -> torch.Tensor | None:
        """[2I] or None."""
        bias = self.stack.gate_up_bias
        return None if bias is None else bias[self.index]

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[H] or None."""
        bias = self.stack.down_bias
        return None if bias is None else bias[self.index]

    def write(self, weights: ExpertWeights) -> None:
        """Copy an expert's weights here."""
        inner = weights.gate.shape[0]
        gate_up = self.gate_up
        gate_up[:inner].copy_(weights.gate)
        gate_up[inner:].copy_(weights.up)
        self.down.copy_(weights.down)
        gate_up_bias, down_bias = self.gate_up_bias, self.down_bias
        if gate_up_bias is None or down_bias is None:
            return
        if weights.gate_bias is None or weights.up_bias is None or weights.down_bias is None:
            raise ValueError("an expert of a model with biases has none")
        gate_up_bias[:inner].copy_(weights.gate_bias)
        gate_up_bias[inner:].copy_(weights.up_bias)
        down_bias.copy_(weights.down_bias)

    def give_back(self) -> None:
        """Free the slot; nothing may be reading it."""
        self.stack.give_back(self.index)
