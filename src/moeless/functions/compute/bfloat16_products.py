"""Small bfloat16 experts by compiled loops, where the processor multiplies bfloat16 itself.

A batched product pads all experts to the rows of the fullest and runs over the slots between those
in use; calls for each expert cost more than their arithmetic. The loops do neither. Needs torch.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from moeless.core.model import ExpertShape
from moeless.functions.compute.kernels import Activation
from moeless.functions.compute.rows import Rows
from moeless.functions.compute.weight_stack import WeightStack
from moeless.functions.compute.workspace import Workspace

_COLUMNS = 32
"""The fewest outputs."""
_MAX_MACS = 16e6
"""Multiplications of all gates and ups above which a second thread in one padded product wins
(measured, see docs/log.md)."""


@cache
def can_multiply() -> bool:
    """Whether this processor and compiler have the instruction, and the loops compute with it.

    Compiles the loops where they do.
    """
    config: Any = numba.config
    changed = config.CPU_NAME or config.CPU_FEATURES or config.DISABLE_JIT
    if changed or not llvm.get_host_cpu_features().get("avx512bf16", False):
        return False
    try:
        from moeless.functions.compute.bfloat16_loops import multiply_rows
    except (ImportError, AttributeError, RuntimeError, NumbaError):
        return False  # another llvmlite or LLVM, which does not know them in this form

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 34, generator=generator).bfloat16()
    weight = torch.randn(1, 34, 64, generator=generator).bfloat16()
    y = torch.zeros(11, 64, dtype=torch.bfloat16)
    zero = np.zeros(1, dtype=np.int64)
    multiply_rows(bits(x), np.arange(11), zero, zero + 11, zero, bits(weight), bits(y), zero)
    error = (y.double() - x.double() @ weight[0].double()).abs().max()
    return bool(error < 0.2)


def loops_fit(shape: ExpertShape) -> bool:
    """Whether the loops can compute experts of a shape on this processor.

    Args:
        shape: Of small experts on a CPU.
    """
    if shape.dtype != "bfloat16" or shape.bias or shape.hidden % 2 or shape.intermediate % 2:
        return False
    return min(shape.hidden, 2 * shape.intermediate) >= _COLUMNS and can_multiply()


def bfloat16_loops_pay(stack: WeightStack, sizes_n: Sequence[int]) -> bool:
    """Whether the loops are faster than matrix products.

    Args:
        stack: The weights.
        sizes_n: Rows of each expert.
    """
    if not stack.is_input_major:
        return False
    return torch.get_num_threads() == 1 or sum(sizes_n) * stack.gate_up[0].numel() <= _MAX_MACS


def run_bfloat16_loops(
    stack: WeightStack,
    activation: Activation,
    *,
    slots_n: Sequence[int],
    ranges_n2: Sequence[tuple[int, int]],
    work: Rows,
    workspace: Workspace,
) -> None:
    """Compute the experts of one layer one after the other.

    Args:
        stack: Their weights, input-major.
        activation: From gate and up to the inner rows.
        slots_n: The slot of each expert.
        ranges_n2: The assignments of each expert, from and to.
        work: What they read and write.
        workspace: For intermediate rows.
    """
    from moeless.functions.compute.bfloat16_loops import multiply_rows

    slot_n, range_n2 = np.array(slots_n), np.array(ranges_n2)
    first_n = np.ascontiguousarray(range_n2[:, 0])
    size_n = range_n2[:, 1] - first_n
    ends_n = np.cumsum(size_n)
    place_n, rows = ends_n - size_n, int(ends_n[-1])
    h = workspace.take("h", rows, stack.gate_up.shape[1], dtype=torch.bfloat16)
    source, token_S = bits(work.x_TH.contiguous()), work.token_S.numpy()
    gate_up, down = bits(stack.stored_gate_up), bits(stack.stored_down)
    multiply_rows(source, token_S, first_n, size_n, slot_n, gate_up, bits(h), place_n)
    inner, out = bits(activation(h)), bits(work.y_SH)
    multiply_rows(inner, np.arange(rows), place_n, size_n, slot_n, down, out, first_n)


def bits(tensor: torch.Tensor) -> NDArray[np.uint16]:
    """A bfloat16 tensor on the CPU as 16-bit words."""
    words: NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
    return words
