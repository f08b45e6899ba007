"""One expert's forward pass, with its weights laid out once after an instance is loaded.

On a CPU large experts get oneDNN's own weight layout; until there is time for that they are
computed with as they were read. Small ones stay as they are, side by side in their layer's stack,
because there the call itself costs more than the arithmetic: many of them can run in one call
(``padded``). All layouts give the same result up to rounding.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from moeless.core.model import ExpertShape
from moeless.functions.compute.row_classes import pad_rows
from moeless.functions.compute.weight_stack import StackSlot, WeightStack
from moeless.functions.store.expert_weights import ExpertWeights

_PACK_FROM = 256 * 1024
"""Elements of gate and up from which packing pays (measured, see docs/log.md)."""

_ONEDNN_FROM_MACS = 1.05e6
"""Multiplications (rows x elements) from which oneDNN beats BLAS on plain float32 weights on one
thread; three times as many on several (measured, see docs/log.md)."""


class Linear(Protocol):
    """One matrix (and bias), laid out."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """From rows [n, in] to rows [n, out]; into ``out`` if it is given."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKernel:
    """One expert, ready to run: ``down(activation(gate_up(x)))``.

    The two halves are apart so that experts with few tokens can share the activation.

    Args:
        gate_up: From rows [n, H] to gate and up projection side by side [n, 2I].
        down: From inner rows [n, I] to [n, H].
        inner_size: 2I, columns of gate and up side by side.
        num_bytes: Bytes that the weights hold on the device.
        writes_in_place: Writing into given rows is cheaper than joining results afterwards.
        slot: Where the weights lie in the stack of their layer; None for those outside of one.
    """

    gate_up: Linear
    down: Linear
    inner_size: int
    num_bytes: int
    writes_in_place: bool
    slot: StackSlot | None = None


Activation = Callable[[torch.Tensor], torch.Tensor]


def gated_activation(shape: ExpertShape) -> Activation:
    """The function from gate and up, side by side [n, 2I], to the inner rows [n, I]."""
    if shape.activation == "swiglu_clamped":
        alpha, limit = shape.alpha, shape.limit

        def clamped(h: torch.Tensor) -> torch.Tensor:
            gate, up = h.chunk(2, dim=-1)
            gate = gate.clamp(max=limit)
            up = up.clamp(min=-limit, max=limit)
            return (up + 1) * (gate * torch.sigmoid(gate * alpha))

        return clamped
    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
        "relu": F.relu,
    }
    act = activations[shape.activation]

    def gated(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return act(gate).mul_(up)

    return gated


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Linear, int]:
    """A matrix as it is, on any torch device; returns it with its bytes.

    In float32 on a CPU oneDNN takes over from the number of rows at which its arithmetic outweighs
    the cost of its call.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """
    weight_t, mm, addmm = weight.t(), torch.mm, torch.addmm
    rows_from = sys.maxsize
    onednn: Any = None
    float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if float32_on_cpu and onednn_works(weight.dtype):
        rows_from = math.ceil(_ONEDNN_FROM_MACS / weight.numel())
        onednn = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        # Asked here, since the thread that loads has another number of threads.
        if rows >= rows_from and (rows >= 3 * rows_from or torch.get_num_threads() == 1):
            y: torch.Tensor = onednn(pad_rows(x), weight, bias, "none", [], "")[:rows]
            return y if out is None else out.copy_(y)
        if bias is None:
            return mm(x, weight_t, out=out)
        return addmm(bias, x, weight_t, out=out)

    return linear, weight.nbytes + (bias.nbytes if bias is not None else 0)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Linear, int]:
    """A matrix in oneDNN's layout, CPU only; returns it with its bytes, padding included.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    num_bytes = int(torch.ops.mkldnn._nbytes(packed))
    return _onednn_linear(packed, bias), num_bytes + (bias.nbytes if bias is not None else 0)


def unpacked_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Linear, int]:
    """As ``packed_linear``, with the matrix as it is: slower, but at once."""
    return _onednn_linear(weight, bias), weight.nbytes + (bias.nbytes if bias is not None else 0)


def _onednn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    onednn = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = onednn(pad_rows(x), weight, bias, "none", [], "")[: x.shape[0]]
        return y if out is None else out.copy_(y)

    return linear


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's linear layer and it computes what it should."""
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 24, generator=generator).to(dtype)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    try:
        ops = torch.ops.mkldnn
        packed = ops._reorder_linear_weight(weight)
        got = [ops._linear_pointwise.default(x, w, None, "none", [], "") for w in (packed, weight)]
        sized = int(ops._nbytes(packed)) >= weight.nbytes
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    expected = F.linear(x.double(), weight.double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    return sized and all((y.double() - expected).abs().max() < tolerance for y in got)


def is_stacked(shape: ExpertShape, device: str) -> bool:
    """Whether an expert is so small that its weights lie in its layer's stack."""
    return device == "cpu" and 2 * shape.intermediate * shape.hidden < _PACK_FROM


def is_packed(shape: ExpertShape, device: str) -> bool:
    """Whether an expert's weights get oneDNN's own layout."""
    if device != "cpu" or is_stacked(shape, device):
        return False
    return _packing_pays(2 * shape.intermediate * shape.hidden, getattr(torch, shape.dtype))


def keeps_weights(shape: ExpertShape, device: str) -> bool:
    """Whether a kernel computes with the tensors that it is built from, not with copies."""
    return device == "cpu" and not is_stacked(shape, device) and not is_packed(shape, device)


def _packing_pays(num_elements: int, dtype: torch.dtype) -> bool:
    return num_elements >= _PACK_FROM and onednn_works(dtype)


def build_stacked_kernel(weights: ExpertWeights, stack: WeightStack) -> ExpertKernel:
    """Copy a small expert's weights into its layer's stack.

    Raises:
        MemoryError: The stack is full.
    """
    slot = stack.put(weights)
    gate_up = slot.gate_up
    first, first_bytes = plain_linear(gate_up, slot.gate_up_bias)
    second, second_bytes = plain_linear(slot.down, slot.down_bias)
    return ExpertKernel(
        gate_up=first,
        down=second,
        inner_size=gate_up.shape[0],
        num_bytes=first_bytes + second_bytes,
        writes_in_place=True,
        slot=slot,
    )


def build_kernel(weights: ExpertWeights, device: str, *, as_read: bool = False) -> ExpertKernel:
    """Lay out the weights of one expert that is on its own.

    Args:
        weights: In the store's canonical form.
        device: A torch device name.
        as_read: Compute with the weights as they are where others would be packed.
    """
    gate_up = weights.gate_up.to(device)
    down = weights.down.to(device)
    gate_up_bias = down_bias = None
    if weights.gate_bias is not None and weights.up_bias is not None:
        gate_up_bias = torch.cat([weights.gate_bias, weights.up_bias]).to(device)
    if weights.down_bias is not None:
        down_bias = weights.down_bias.to(device)
    packs = device == "cpu" and _packing_pays(gate_up.numel(), gate_up.dtype)
    layout = (unpacked_linear if as_read else packed_linear) if packs else plain_linear
    first, first_bytes = layout(gate_up, gate_up_bias)
    second, second_bytes = layout(down, down_bias)
    return ExpertKernel(
        gate_up=first,
        down=second,
        inner_size=gate_up.shape[0],
        num_bytes=first_bytes + second_bytes,
        writes_in_place=not packs,
    )
