"""One expert's forward pass, with its weights laid out once when an instance is loaded.

On a CPU oneDNN's own weight layout is used where it pays: large matrices in float32 and all in
bfloat16. Small float32 matrices stay as they are, because there the call itself costs more than
the arithmetic. Both layouts give the same result up to rounding.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from moeless.core.model import ExpertShape
from moeless.functions.store.expert_weights import ExpertWeights

_PACK_FLOAT32_FROM = 256 * 1024
"""Elements of gate and up from which packing float32 pays (measured, see docs/log.md)."""

_ONEDNN_ROWS_FROM = 16
"""Rows from which oneDNN beats BLAS on unpacked float32 weights."""


class ExpertKernel(Protocol):
    """One expert, ready to run: ``down(activation(gate_up(x)))``.

    The two halves are apart so that experts with few tokens can share the activation.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes that its weights hold on the device."""
        ...

    def gate_up(self, x_nH: torch.Tensor) -> torch.Tensor:
        """Gate and up projection side by side [n, 2I] of rows [n, H]."""
        ...

    def down(self, h_nI: torch.Tensor) -> torch.Tensor:
        """Down projection [n, H] of inner rows [n, I]."""
        ...


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


class DenseExpert:
    """Plain weights; any torch device.

    Args:
        gate_up: [2I, H].
        down: [H, I].
        gate_up_bias: [2I] or None.
        down_bias: [H] or None.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> None:
        self._tensors = (gate_up, down, gate_up_bias, down_bias)
        onednn = gate_up.device.type == "cpu" and onednn_works(gate_up.dtype)
        self._onednn_from = _ONEDNN_ROWS_FROM if onednn else sys.maxsize
        self._gate_up_t, self._down_t = gate_up.t(), down.t()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and biases."""
        return sum(t.nbytes for t in self._tensors if t is not None)

    def gate_up(self, x_nH: torch.Tensor) -> torch.Tensor:
        """Gate and up projection side by side [n, 2I] of rows [n, H]."""
        return self._linear(x_nH, self._gate_up_t, self._tensors[0], self._tensors[2])

    def down(self, h_nI: torch.Tensor) -> torch.Tensor:
        """Down projection [n, H] of inner rows [n, I]."""
        return self._linear(h_nI, self._down_t, self._tensors[1], self._tensors[3])

    def _linear(
        self,
        x: torch.Tensor,
        weight_t: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor
        if x.shape[0] >= self._onednn_from:
            y = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        else:
            y = torch.mm(x, weight_t) if bias is None else torch.addmm(bias, x, weight_t)
        return y


class PackedExpert:
    """Weights in oneDNN's layout; CPU only. Arguments as for ``DenseExpert``."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> None:
        ops = torch.ops.mkldnn
        self._linear = ops._linear_pointwise.default
        self._gate_up = ops._reorder_linear_weight(gate_up)
        self._down = ops._reorder_linear_weight(down)
        self._gate_up_bias, self._down_bias = gate_up_bias, down_bias

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights (with oneDNN's padding) and the biases."""
        packed = sum(int(torch.ops.mkldnn._nbytes(w)) for w in (self._gate_up, self._down))
        biases = (self._gate_up_bias, self._down_bias)
        return packed + sum(b.nbytes for b in biases if b is not None)

    def gate_up(self, x_nH: torch.Tensor) -> torch.Tensor:
        """Gate and up projection side by side [n, 2I] of rows [n, H]."""
        h: torch.Tensor = self._linear(x_nH, self._gate_up, self._gate_up_bias, "none", [], "")
        return h

    def down(self, h_nI: torch.Tensor) -> torch.Tensor:
        """Down projection [n, H] of inner rows [n, I]."""
        y: torch.Tensor = self._linear(h_nI, self._down, self._down_bias, "none", [], "")
        return y


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's linear layer and it computes what it should."""
    if not torch.backends.mkldnn.is_available():
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


def build_kernel(weights: ExpertWeights, device: str) -> ExpertKernel:
    """Lay out one expert's weights for a device.

    Args:
        weights: In the store's canonical form.
        device: A torch device name.
    """
    gate_up = torch.cat([weights.gate, weights.up]).to(device)
    down = weights.down.to(device)
    gate_up_bias = down_bias = None
    if weights.gate_bias is not None and weights.up_bias is not None:
        gate_up_bias = torch.cat([weights.gate_bias, weights.up_bias]).to(device)
    if weights.down_bias is not None:
        down_bias = weights.down_bias.to(device)
    packs = (
        device == "cpu"
        and onednn_works(gate_up.dtype)
        and (gate_up.dtype == torch.bfloat16 or gate_up.numel() >= _PACK_FLOAT32_FROM)
    )
    kernel = PackedExpert if packs else DenseExpert
    return kernel(gate_up, down, gate_up_bias, down_bias)
