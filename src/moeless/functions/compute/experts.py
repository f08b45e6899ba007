"""The experts of one model on one device: their weights laid out, and what computes with them.

On a CPU weights lie in panels (``panels``) and all experts of an invocation go through two
products, whatever their size: each row's result is the same whichever rows and experts are
computed beside it. On other devices, and for what panels do not know (float16, no compiler), torch
computes expert by expert. Needs torch.
"""

import mmap
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.compute.panels import (
    GATED_MODES,
    PanelMatrix,
    PanelShape,
    Products,
    Way,
    can_lay_out,
    way_for,
)
from moeless.functions.compute.tiles import COLUMNS
from moeless.functions.compute.workspace import Workspace
from moeless.functions.links.segment_status import FAILED, NOT_WARM, OK
from moeless.functions.store.expert_weights import ExpertWeights

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # not known on every system
_HUGE_BYTES = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Experts(Protocol):
    """Instances of one model's functions on one device."""

    function_bytes: int
    """Bytes that an instance holds."""

    def put(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Make an instance of weights, which are not used afterwards.

        Raises:
            MemoryError: There is no room.
        """
        ...

    def drop(self, layer: int, expert: int) -> None:
        """Give an instance up; nothing may be computing with it."""
        ...

    def run(
        self,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments_n3: NDArray[np.int32],
        y_SH: torch.Tensor,
        status_n: NDArray[np.uint8],
    ) -> None:
        """Compute the rows of some instances; see ``host.ExpertHost.invoke``."""
        ...


def experts_on(spec: ModelSpec, device: str) -> Experts:
    """An empty set of a model's instances.

    Args:
        spec: The model.
        device: A torch device name.
    """
    way = way_for(spec.expert.dtype) if device == "cpu" else None
    return TorchExperts(spec, device) if way is None else PanelExperts(spec, way)


def function_bytes(shape: ExpertShape, device: str) -> int:
    """Bytes that an instance holds on a device, the padding of its layout included.

    Args:
        shape: The expert.
        device: A torch device name; only its kind matters, nothing is allocated.
    """
    if device == "cpu" and can_lay_out(shape.dtype):
        return _Layout(shape).num_bytes
    return shape.num_bytes


class _Layout:
    """Where an expert's parameters lie in one block of bytes."""

    def __init__(self, shape: ExpertShape) -> None:
        hidden, inner, dtype = shape.hidden, shape.intermediate, shape.dtype
        self.gate_up = PanelShape(width=inner, depth=hidden, dtype=dtype, gated=True)
        self.down = PanelShape(width=hidden, depth=inner, dtype=dtype)
        self.down_at = self.gate_up.weight_bytes
        self.bias_at = self.down_at + self.down.weight_bytes
        biases = self.gate_up.panels + self.down.panels if shape.bias else 0
        self.slack_at = self.bias_at + biases * COLUMNS * 4
        self.num_bytes = self.slack_at + self.down.slack_bytes


class _Block:
    """One expert's parameters as they are computed with."""

    def __init__(self, layout: _Layout, weights: ExpertWeights) -> None:
        memory = _map(layout.num_bytes)
        self.gate_up = PanelMatrix(layout.gate_up, memory)
        self.gate_up.write(weights.gate)
        self.gate_up.write(weights.up, ups=True)
        self.down = PanelMatrix(layout.down, memory[layout.down_at :])
        self.down.write(weights.down)
        self.gate_up_bias = self.down_bias = 0
        if layout.slack_at == layout.bias_at:
            return
        if weights.gate_bias is None or weights.up_bias is None or weights.down_bias is None:
            raise ValueError("an expert of a model with biases has none")
        biases = memory[layout.bias_at : layout.slack_at].view(torch.float32)
        self.gate_up_bias = biases.data_ptr()
        count = layout.gate_up.panels * COLUMNS
        self.down_bias = self.gate_up_bias + 4 * count
        halves = biases[:count].view(-1, 2, COLUMNS // 2)
        for half, bias in enumerate((weights.gate_bias, weights.up_bias)):
            whole = torch.zeros(count // 2)
            whole[: len(bias)] = bias
            halves[:, half] = whole.view(-1, COLUMNS // 2)
        biases[count : count + len(weights.down_bias)] = weights.down_bias


def _map(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes in pages of their own, so that an eviction gives them back to the system."""
    try:
        region = mmap.mmap(-1, num_bytes, flags=_PRIVATE)
    except (OSError, ValueError) as error:
        raise MemoryError(f"no {num_bytes:,} bytes for an expert: {error}") from error
    if _HUGE_PAGES is not None and num_bytes >= _HUGE_BYTES:
        region.madvise(_HUGE_PAGES)
    return torch.frombuffer(region, dtype=torch.uint8)


class _Table:
    """Addresses of one layer's instances by expert, 0 for what is not there."""

    def __init__(self, experts: int) -> None:
        self.gate_up_E, self.down_E, self.gate_up_bias_E, self.down_bias_E = (
            np.zeros(experts, dtype=np.int64) for _ in range(4)
        )


class PanelExperts:
    """Instances on the CPU, in panels.

    Args:
        spec: The model.
        way: How they are multiplied.
    """

    def __init__(self, spec: ModelSpec, way: Way) -> None:
        shape = spec.expert
        self._spec = spec
        self._layout = _Layout(shape)
        self.function_bytes = self._layout.num_bytes
        self._tables: dict[int, _Table] = {}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._products = Products(way)
        self._inner_dtype = torch.bfloat16 if way.halves else torch.float32
        self._mode = GATED_MODES[shape.activation]
        self._parameters = shape.alpha, shape.limit
        self._workspace = Workspace()

    def put(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Lay an instance out; see ``Experts``."""
        block = _Block(self._layout, weights)
        self._blocks[layer, expert] = block
        table = self._tables.setdefault(layer, _Table(self._spec.num_experts))
        table.down_E[expert] = block.down.address
        table.gate_up_bias_E[expert] = block.gate_up_bias
        table.down_bias_E[expert] = block.down_bias
        table.gate_up_E[expert] = block.gate_up.address  # last: from now on it is warm

    def drop(self, layer: int, expert: int) -> None:
        """Give an instance up; see ``Experts``."""
        if self._blocks.pop((layer, expert), None) is not None:
            self._tables[layer].gate_up_E[expert] = 0

    def run(
        self,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments_n3: NDArray[np.int32],
        y_SH: torch.Tensor,
        status_n: NDArray[np.uint8],
    ) -> None:
        """Compute; see ``Experts``."""
        status_n[:] = NOT_WARM
        table = self._tables.get(layer)
        if table is None or not len(segments_n3):
            return
        expert_n, start_n, stop_n = segments_n3.T.astype(np.int64)
        weight_n = table.gate_up_E[expert_n]
        warm = weight_n.nonzero()[0]
        if len(warm) < len(weight_n):
            if not len(warm):
                return
            expert_n, start_n, stop_n = expert_n[warm], start_n[warm], stop_n[warm]
            weight_n = weight_n[warm]
        segments = np.empty((len(warm), 6), dtype=np.int64)
        rows_n = segments[:, 4] = stop_n - start_n
        ends_n = rows_n.cumsum()
        place_n = ends_n - rows_n
        total, most = int(ends_n[-1]), int(rows_n.max())
        segments[:, 0], segments[:, 1] = weight_n, table.gate_up_bias_E[expert_n]
        segments[:, 2], segments[:, 3] = start_n, place_n
        shape = self._spec.expert
        try:
            inner = self._workspace.take(
                "inner", total, shape.intermediate, dtype=self._inner_dtype
            )
            self._products.run(
                segments,
                self._layout.gate_up,
                x=x_TH.contiguous(),
                index=token_S.data_ptr(),
                out=inner,
                most_rows=most,
                total_rows=total,
                mode=self._mode,
                parameters=self._parameters,
            )
            segments[:, 0], segments[:, 1] = table.down_E[expert_n], table.down_bias_E[expert_n]
            segments[:, 2], segments[:, 3] = place_n, start_n
            self._products.run(
                segments,
                self._layout.down,
                x=inner,
                out=y_SH,
                most_rows=most,
                total_rows=total,
            )
        except (RuntimeError, MemoryError):
            status_n[warm] = FAILED
        else:
            status_n[warm] = OK


def gated_activation(shape: ExpertShape) -> Callable[[torch.Tensor], torch.Tensor]:
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


class TorchExperts:
    """Instances on any torch device, computed one after the other.

    Args:
        spec: The model.
        device: A torch device name.
    """

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self.function_bytes = spec.expert.num_bytes
        self._device = device
        self._activation = gated_activation(spec.expert)
        self._weights: dict[tuple[int, int], tuple[torch.Tensor | None, ...]] = {}

    def put(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Copy an instance to the device; see ``Experts``."""
        gate_up_bias = None
        if weights.gate_bias is not None and weights.up_bias is not None:
            gate_up_bias = torch.cat([weights.gate_bias, weights.up_bias])
        tensors = weights.gate_up, gate_up_bias, weights.down, weights.down_bias
        self._weights[layer, expert] = tuple(
            None if tensor is None else tensor.to(self._device, copy=True) for tensor in tensors
        )

    def drop(self, layer: int, expert: int) -> None:
        """Give an instance up; see ``Experts``."""
        self._weights.pop((layer, expert), None)

    def run(
        self,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments_n3: NDArray[np.int32],
        y_SH: torch.Tensor,
        status_n: NDArray[np.uint8],
    ) -> None:
        """Compute; see ``Experts``."""
        for i, (expert, start, stop) in enumerate(segments_n3.tolist()):
            weights = self._weights.get((layer, expert))
            status_n[i] = NOT_WARM
            if weights is None:
                continue
            gate_up, gate_up_bias, down, down_bias = weights
            assert gate_up is not None
            assert down is not None
            try:
                x_nH = x_TH.index_select(0, token_S[start:stop]).to(self._device)
                inner = self._activation(F.linear(x_nH, gate_up, gate_up_bias))
                y_SH[start:stop].copy_(F.linear(inner, down, down_bias))
            except (RuntimeError, MemoryError):
                status_n[i] = FAILED
            else:
                status_n[i] = OK
