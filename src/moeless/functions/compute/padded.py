"""Many small experts in one batched matrix product, each padded to as many rows as the fullest.

With small experts it is the number of calls that costs, not the arithmetic: so all experts between
the lowest and the highest slot in use are computed, with rows that nobody needs where an expert
has fewer than the fullest. Needs torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import ExpertShape
from moeless.functions.compute.kernels import Activation, gated_activation, is_stacked
from moeless.functions.compute.row_classes import round_up_rows
from moeless.functions.compute.rows import Rows
from moeless.functions.compute.weight_stack import WeightStack
from moeless.functions.compute.workspace import Workspace

_WASTED_WEIGHTS = 220e3
"""Elements of gate and up of experts without rows that cost as much as the calls of one expert
(bfloat16)."""
_WASTED_MACS = 2.8e6
"""Multiplications of gate and up in vain that cost as much as the calls of one expert
(bfloat16)."""
_MAX_ROWS_BYTES = 12 << 20
"""Padded input rows beyond which they no longer stay in the cache (bfloat16)."""

_FLOAT32_MAX_MACS = 4.2e6
"""Multiplications of one expert's gate and up (padded rows x elements) above which a call for each
expert is as fast, because it uses all threads (float32)."""
_FLOAT32_MAX_WASTE = 2.7
"""Padded rows per needed row above which it is slower (float32)."""
_FLOAT32_MIN_MACS = 0.8e6
"""Multiplications of all gates and ups below which a second thread costs more than it brings
(float32)."""


_LOOP_MAX_MOVED = 1 << 17
"""Elements of all rows up to which one thread moves them as fast as several."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """A way to run experts together.

    Args:
        lowest: Lowest slot in use.
        slots: How many slots there are from the lowest to the highest in use.
        rows: Rows of the fullest expert, or some more (``row_classes``); all are padded to this.
        needed: Rows of all of them.
    """

    lowest: int
    slots: int
    rows: int
    needed: int


def find_padding(
    gate_up: torch.Tensor, slots_n: Sequence[int], sizes_n: Sequence[int]
) -> Padding | None:
    """How to pad these experts, or None where a call for each is faster (see docs/log.md).

    Args:
        gate_up: The stack's gate and up projections [N, 2I, H].
        slots_n: The slot of each expert.
        sizes_n: The rows of each.
    """
    experts, needed = len(sizes_n), sum(sizes_n)
    _, inner, hidden = gate_up.shape
    elements = inner * hidden
    float32 = gate_up.dtype == torch.float32
    if experts < 2 or (float32 and needed * elements < _FLOAT32_MIN_MACS):
        return None
    lowest, rows = min(slots_n), max(sizes_n)
    if not float32:
        rows = round_up_rows(rows)
    slots = max(slots_n) - lowest + 1
    padded = rows * slots
    if float32:
        pays = (
            torch.get_num_threads() > 1  # all that batching brings here is parallelism
            and rows > 1
            and rows * elements <= _FLOAT32_MAX_MACS
            and padded <= _FLOAT32_MAX_WASTE * needed
        )
    else:
        waste = (slots - experts) * elements / _WASTED_WEIGHTS
        waste += (padded - needed) * elements / _WASTED_MACS
        rows_bytes = padded * hidden * gate_up.element_size()
        pays = waste < experts and rows_bytes <= _MAX_ROWS_BYTES
    return Padding(lowest=lowest, slots=slots, rows=rows, needed=needed) if pays else None


def run_padded(
    padding: Padding,
    stack: WeightStack,
    activation: Activation,
    *,
    slots_n: Sequence[int],
    ranges_n2: Sequence[tuple[int, int]],
    work: Rows,
    workspace: Workspace,
) -> None:
    """Compute the experts of one layer together.

    Args:
        padding: Of these experts.
        stack: Their weights.
        activation: From gate and up to the inner rows.
        slots_n: The slot of each expert.
        ranges_n2: The assignments of each expert, from and to.
        work: What they read and write.
        workspace: For intermediate rows.
    """
    low, slots, rows = padding.lowest, padding.slots, padding.rows
    hidden, inner = work.x_TH.shape[1], stack.gate_up.shape[1]
    places = _choose_places(padding, slots_n, ranges_n2, work)
    if len(work.x_TH) == 1:
        x = work.x_TH.expand(slots, rows, hidden)
    else:
        x = workspace.take("x", slots, rows, hidden, dtype=work.x_TH.dtype)
        places.gather(x.view(-1, hidden))
    h = workspace.take("h", slots, rows, inner, dtype=x.dtype)
    torch.bmm(x, stack.gate_up[low : low + slots].transpose(1, 2), out=h)
    if stack.gate_up_bias is not None:
        h.add_(stack.gate_up_bias[low : low + slots, None])
    h = activation(h)
    y = workspace.take("x", slots, rows, hidden, dtype=x.dtype)  # the input is done with
    torch.bmm(h, stack.down[low : low + slots].transpose(1, 2), out=y)
    if stack.down_bias is not None:
        y.add_(stack.down_bias[low : low + slots, None])
    places.scatter(y.view(-1, hidden))


class _Places(Protocol):
    """Where each assignment's row is among the padded ones."""

    def gather(self, padded_PH: torch.Tensor) -> None:
        """Copy inputs there; what is padded is left as it is, or reads any row."""
        ...

    def scatter(self, padded_PH: torch.Tensor) -> None:
        """Copy outputs from there."""
        ...


def _choose_places(
    padding: Padding,
    slots_n: Sequence[int],
    ranges_n2: Sequence[tuple[int, int]],
    work: Rows,
) -> _Places:
    first_n = (np.array(slots_n) - padding.lowest) * padding.rows
    moved = padding.needed * work.x_TH.shape[1]
    alone = torch.get_num_threads() == 1 or moved <= _LOOP_MAX_MOVED
    if alone or ranges_n2[-1][1] - ranges_n2[0][0] != padding.needed:
        return _Loops(first_n, np.array(ranges_n2), work)
    return _Indices(first_n, ranges_n2, work)


class _Loops:
    """Rows moved by compiled loops."""

    def __init__(self, first_n: IntArray, range_n2: IntArray, work: Rows) -> None:
        self._first_n, self._range_n2, self._work = first_n, range_n2, work

    def gather(self, padded_PH: torch.Tensor) -> None:
        from moeless.functions.compute.padded_loops import take_rows

        x_TH, token_S = self._work.x_TH.contiguous(), self._work.token_S.numpy()
        out = _as_bits(padded_PH)
        take_rows(_as_bits(x_TH), token_S, self._range_n2, self._first_n, out)

    def scatter(self, padded_PH: torch.Tensor) -> None:
        from moeless.functions.compute.padded_loops import place_rows

        out = _as_bits(self._work.y_SH)
        place_rows(_as_bits(padded_PH), self._first_n, self._range_n2, out)


class _Indices:
    """Rows moved by torch, with all its threads; the ranges follow each other without a gap."""

    def __init__(
        self, first_n: IntArray, ranges_n2: Sequence[tuple[int, int]], work: Rows
    ) -> None:
        self._start, self._stop, self._work = ranges_n2[0][0], ranges_n2[-1][1], work
        sizes_n = [stop - start for start, stop in ranges_n2]
        self._place_S = np.arange(self._stop - self._start)
        self._place_S += np.repeat(first_n - np.cumsum(sizes_n) + sizes_n, sizes_n)

    def gather(self, padded_PH: torch.Tensor) -> None:
        source_P = np.zeros(len(padded_PH), dtype=np.int64)
        source_P[self._place_S] = self._work.token_S[self._start : self._stop].numpy()
        torch.index_select(self._work.x_TH, 0, torch.from_numpy(source_P), out=padded_PH)

    def scatter(self, padded_PH: torch.Tensor) -> None:
        places, y_SH = torch.from_numpy(self._place_S), self._work.y_SH
        torch.index_select(padded_PH, 0, places, out=y_SH[self._start : self._stop])


def _as_bits(rows: torch.Tensor) -> NDArray[np.uint16]:
    """The rows of a CPU tensor as 16-bit words."""
    bits: NDArray[np.uint16] = rows.view(torch.uint16).numpy()
    return bits


def small_activation(shape: ExpertShape, device: str) -> Activation:
    """The activation of experts that are run together; compiled where torch's is slow.

    Halves of rows that are narrower than some cache lines are strided for torch, which takes
    five times as long per element for bfloat16 then (see docs/log.md). The result is the same to
    the bit. Also gets the other loops ready before a token needs them.

    Args:
        shape: Of the experts.
        device: Where they run, a torch device name.
    """
    plain = gated_activation(shape)
    if not is_stacked(shape, device):
        return plain
    from moeless.functions.compute.padded_loops import silu_times_up

    if shape.dtype != "bfloat16" or shape.activation != "silu":
        return plain

    def compiled(h: torch.Tensor) -> torch.Tensor:
        inner = h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
        silu_times_up(_as_bits(h.view(-1, h.shape[-1])), _as_bits(inner.view(-1, inner.shape[-1])))
        return inner

    return compiled
