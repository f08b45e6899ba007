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
_FLOAT32_MAX_WASTE = 2.7
"""Padded rows per needed row above which it is slower (float32)."""
_FLOAT32_MIN_MACS = 0.8e6
"""Multiplications of all gates and ups below which a second thread costs more than it brings
(float32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """A way to run experts together.

    Args:
        lowest: Lowest slot in use.
        slots: How many slots there are from the lowest to the highest in use.
        rows: Rows of the fullest expert; all are padded to this.
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
    x_TH, y_SH = work.x_TH, work.y_SH
    low, slots, rows = padding.lowest, padding.slots, padding.rows
    hidden, inner = x_TH.shape[1], stack.gate_up.shape[1]
    at_n = (np.array(slots_n) - low) * rows
    if rows == 1:
        place_S = at_n
    else:
        sizes_n = [stop - start for start, stop in ranges_n2]
        place_S = np.arange(padding.needed)
        place_S += np.repeat(at_n - np.cumsum(sizes_n) + sizes_n, sizes_n)

    if len(x_TH) == 1:
        x = x_TH.expand(slots, rows, hidden)
    else:
        source_P = np.zeros(slots * rows, dtype=np.int64)  # what is padded reads any row
        source_P[place_S] = work.tokens_of(ranges_n2).numpy()
        x = workspace.take("x", slots, rows, hidden, dtype=x_TH.dtype)
        torch.index_select(x_TH, 0, torch.from_numpy(source_P), out=x.view(-1, hidden))
    h = workspace.take("h", slots, rows, inner, dtype=x_TH.dtype)
    torch.bmm(x, stack.gate_up[low : low + slots].transpose(1, 2), out=h)
    if stack.gate_up_bias is not None:
        h.add_(stack.gate_up_bias[low : low + slots, None])
    h = activation(h)
    y = workspace.take("x", slots, rows, hidden, dtype=x_TH.dtype)  # the input is done with
    torch.bmm(h, stack.down[low : low + slots].transpose(1, 2), out=y)
    if stack.down_bias is not None:
        y.add_(stack.down_bias[low : low + slots, None])
    first, last = ranges_n2[0][0], ranges_n2[-1][1]
    if last - first == padding.needed:
        places = torch.from_numpy(place_S)
        torch.index_select(y.view(-1, hidden), 0, places, out=y_SH[first:last])
    else:
        for slot, (start, stop) in zip(slots_n, ranges_n2, strict=True):
            y_SH[start:stop] = y[slot - low, : stop - start]
