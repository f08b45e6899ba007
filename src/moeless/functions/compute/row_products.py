"""Few float32 rows through many small experts, in two compiled loops instead of two calls each.

With one row or two per expert a matrix product is a few microseconds of arithmetic behind as many
of call overhead. Needs torch.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moeless.core.model import ExpertShape
from moeless.functions.compute.kernels import Activation, is_stacked
from moeless.functions.compute.rows import Rows
from moeless.functions.compute.weight_stack import WeightStack
from moeless.functions.compute.workspace import Workspace

_MAX_ROWS_PER_EXPERT = 8
"""Mean rows per expert up to which the loops beat matrix products on one thread."""
_MAX_MACS = 2.0e6
"""Multiplications of all gates and ups above which a second thread in one padded product wins
(both measured, see docs/log.md)."""


def prepare_row_loops(shape: ExpertShape, device: str) -> None:
    """Get the compiled loops ready before a token needs them, where they will be used.

    Args:
        shape: Of the experts.
        device: Where they run, a torch device name.
    """
    if shape.dtype == "float32" and not shape.bias and is_stacked(shape, device):
        import moeless.functions.compute.row_loops  # noqa: F401 - compiles when imported


def row_loops_pay(stack: WeightStack, sizes_n: Sequence[int]) -> bool:
    """Whether the loops are faster than matrix products.

    Args:
        stack: The weights.
        sizes_n: Rows of each expert.
    """
    gate_up, rows = stack.gate_up, sum(sizes_n)
    if gate_up.dtype != torch.float32 or stack.gate_up_bias is not None:
        return False
    if torch.get_num_threads() > 1 and rows * gate_up[0].numel() > _MAX_MACS:
        return False
    return rows <= _MAX_ROWS_PER_EXPERT * len(sizes_n)


def run_row_loops(
    stack: WeightStack,
    activation: Activation,
    *,
    slots_n: Sequence[int],
    ranges_n2: Sequence[tuple[int, int]],
    work: Rows,
    workspace: Workspace,
) -> None:
    """Compute the experts of one layer row by row.

    Args:
        stack: Their weights.
        activation: From gate and up to the inner rows.
        slots_n: The slot of each expert.
        ranges_n2: The assignments of each expert, from and to.
        work: What they read and write.
        workspace: For intermediate rows.
    """
    from moeless.functions.compute.row_loops import down_rows, gate_up_rows

    slot_n, range_n2 = np.array(slots_n), np.array(ranges_n2)
    rows = int((range_n2[:, 1] - range_n2[:, 0]).sum())
    h = workspace.take("h", rows, stack.gate_up.shape[1], dtype=torch.float32)
    x_TH, token_S, y_SH = work.x_TH.contiguous().numpy(), work.token_S.numpy(), work.y_SH.numpy()
    gate_up_rows(x_TH, token_S, range_n2, slot_n, stack.gate_up.numpy(), h.numpy())
    inner = activation(h).numpy()
    down_rows(inner, range_n2, slot_n, stack.down.numpy(), y_SH)
