"""Several experts of one layer on a CPU: one gather, one activation, as few calls as possible.

With small experts it is the number of calls that decides, not the arithmetic. Needs torch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from moeless.functions.compute.bfloat16_products import bfloat16_loops_pay, run_bfloat16_loops
from moeless.functions.compute.kernels import Activation, ExpertKernel
from moeless.functions.compute.padded import find_padding, run_padded
from moeless.functions.compute.row_products import row_loops_pay, run_row_loops
from moeless.functions.compute.rows import Rows
from moeless.functions.compute.weight_stack import StackSlot
from moeless.functions.compute.workspace import Workspace

_TOGETHER_ELEMENTS = 1 << 20
"""Elements of all gate and up rows of an invocation up to which joining them for one activation
costs less than calling it for each expert (measured, see docs/log.md)."""


def run_together(
    kernels: Sequence[ExpertKernel],
    ranges_n2: Sequence[tuple[int, int]],
    activation: Activation,
    work: Rows,
    workspace: Workspace,
) -> bool:
    """Run experts together where that pays.

    Args:
        kernels: Of experts of one layer, all on the CPU.
        ranges_n2: The assignments of each, from and to, ascending.
        activation: From gate and up to the inner rows.
        work: What they read and write.
        workspace: For intermediate rows.

    Returns:
        Whether it was done; if not, nothing has been computed.
    """
    sizes = [stop - start for start, stop in ranges_n2]
    slots = [kernel.slot for kernel in kernels if kernel.slot is not None]
    if len(slots) == len(kernels) and _run_stacked(
        slots, sizes, ranges_n2, activation, work, workspace
    ):
        return True
    x_TH, rows, inner_size = work.x_TH, sum(sizes), kernels[0].inner_size
    if rows * inner_size > _TOGETHER_ELEMENTS:
        return False
    if len(x_TH) == 1 and len(kernels) == rows:
        xs: Sequence[torch.Tensor] = [x_TH] * len(kernels)
    else:
        x = workspace.take("x", rows, x_TH.shape[1], dtype=x_TH.dtype)
        torch.index_select(x_TH, 0, work.tokens_of(ranges_n2), out=x)
        xs = x.split_with_sizes(sizes)
    if kernels[0].writes_in_place:
        h = workspace.take("h", rows, inner_size, dtype=x_TH.dtype)
        for kernel, x, out in zip(kernels, xs, h.split_with_sizes(sizes), strict=True):
            kernel.gate_up(x, out)
    else:
        h = torch.cat([kernel.gate_up(x) for kernel, x in zip(kernels, xs, strict=True)])
    inner = activation(h).split_with_sizes(sizes)
    first, last = ranges_n2[0][0], ranges_n2[-1][1]
    ys: Sequence[torch.Tensor]
    if last - first == rows:
        ys = work.y_SH[first:last].split_with_sizes(sizes)
    else:
        ys = [work.y_SH[start:stop] for start, stop in ranges_n2]
    for kernel, x, y in zip(kernels, inner, ys, strict=True):
        kernel.down(x, y)
    return True


def _run_stacked(
    slots: Sequence[StackSlot],
    sizes: Sequence[int],
    ranges_n2: Sequence[tuple[int, int]],
    activation: Activation,
    work: Rows,
    workspace: Workspace,
) -> bool:
    """Run small experts of one stack in the way that is fastest, if it is one of these."""
    stack, indices = slots[0].stack, [slot.index for slot in slots]
    run: Callable[..., None]
    if row_loops_pay(stack, sizes):
        run = run_row_loops
    elif bfloat16_loops_pay(stack, sizes):
        run = run_bfloat16_loops
    elif (padding := find_padding(stack.gate_up, indices, sizes)) is not None:
        run = partial(run_padded, padding)
    else:
        return False
    run(
        stack,
        activation,
        slots_n=indices,
        ranges_n2=ranges_n2,
        work=work,
        workspace=workspace,
    )
    return True
