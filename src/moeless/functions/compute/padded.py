"""Many small experts in one batched matrix product, each padded to as many rows as the fullest.

With small experts it is the number of calls that costs, not the arithmetic: so all experts between
the lowest and the highest slot in use are computed, with rows that nobody needs where an expert
has fewer than the fullest. Needs torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeless.functions.compute.kernels import Activation
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
_FLOAT32_MAX_WASTE = 2.5
"""Padded rows per needed row above which it is slower (float32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """A way to run experts together.

    Args:
        lowest: Lowest slot in use.
        slots: How many slots there are from the lowest to the highest in use.
        rows: Rows of the fullest expert; all are padded to this.
        experts: How many experts have rows.
        needed: Rows of all of them.
    """

    lowest: int
    slots: int
    rows: int
    experts: int
    needed: int

    @classmethod
    def of(cls, slots_n: Sequence[int], sizes_n: Sequence[int]) -> "Padding":
        """The padding for experts in these slots with so many rows."""
        lowest = min(slots_n)
        return cls(
            lowest=lowest,
            slots=max(slots_n) - lowest + 1,
            rows=max(sizes_n),
            experts=len(sizes_n),
            needed=sum(sizes_n),
        )

    def pays(self, gate_up: torch.Tensor) -> bool:
        """Whether it is faster than calls for each expert (measured, see docs/log.md).

        Args:
            gate_up: The stack's gate and up projections [N, 2I, H].
        """
        if self.experts < 2:
            return False
        _, inner, hidden = gate_up.shape
        elements = inner * hidden
        padded = self.rows * self.slots
        if gate_up.dtype == torch.float32:
            return (
                self.rows > 1  # one row each: BLAS's matrix-vector product is faster
                and torch.get_num_threads() > 1  # all that batching brings here is parallelism
                and self.rows * elements <= _FLOAT32_MAX_MACS
                and padded <= _FLOAT32_MAX_WASTE * self.needed
            )
        wasted_weights = (self.slots - self.experts) * elements
        wasted_macs = (padded - self.needed) * elements
        waste = wasted_weights / _WASTED_WEIGHTS + wasted_macs / _WASTED_MACS
        rows_bytes = padded * hidden * gate_up.element_size()
        return waste < self.experts and rows_bytes <= _MAX_ROWS_BYTES


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
    x_TH, y_SH = work.x_TH, work.y_SH
    low, high, rows = padding.lowest, padding.lowest + padding.slots, padding.rows
    padded, dtype = padding.slots * rows, x_TH.dtype
    hidden, inner = x_TH.shape[1], stack.gate_up.shape[1]
    places = [
        np.arange((slot - low) * rows, (slot - low) * rows + stop - start)
        for slot, (start, stop) in zip(slots_n, ranges_n2, strict=True)
    ]
    place_S = np.concatenate(places)
    source_P = np.zeros(padded, dtype=np.int64)  # what is padded reads some row or other
    source_P[place_S] = work.tokens_of(ranges_n2).numpy()

    x = workspace.take("x", padded, hidden, dtype=dtype)
    torch.index_select(x_TH, 0, torch.from_numpy(source_P), out=x)
    h = workspace.take("h", padding.slots, rows, inner, dtype=dtype)
    torch.bmm(x.view(-1, rows, hidden), stack.gate_up[low:high].transpose(1, 2), out=h)
    if stack.gate_up_bias is not None:
        h.add_(stack.gate_up_bias[low:high, None])
    h = activation(h)
    y = x.view(-1, rows, hidden)  # the input is no longer needed
    torch.bmm(h, stack.down[low:high].transpose(1, 2), out=y)
    if stack.down_bias is not None:
        y.add_(stack.down_bias[low:high, None])
    first, last = ranges_n2[0][0], ranges_n2[-1][1]
    if last - first == padding.needed:
        torch.index_select(x, 0, torch.from_numpy(place_S), out=y_SH[first:last])
    else:
        for slot, (start, stop) in zip(slots_n, ranges_n2, strict=True):
            y_SH[start:stop] = y[slot - low, : stop - start]
