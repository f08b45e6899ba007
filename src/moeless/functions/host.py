"""The host of one device: it holds instances, and computes invocations on them.

A host does what the platform orders and what engines invoke; it decides nothing. Loads may run
in one thread while invocations run in another. Needs torch.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import ExpertShape, FunctionId, ModelSpec
from moeless.errors import FunctionError
from moeless.functions.compute.kernels import (
    Activation,
    ExpertKernel,
    build_kernel,
    gated_activation,
)
from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.store.store import ExpertStore

OK, NOT_WARM, FAILED = 0, 1, 2
"""Status of one segment of an invocation."""

_TOGETHER_ELEMENTS = 1 << 20
"""Elements of all gate and up rows of an invocation up to which joining them for one activation
costs less than calling it for each expert (measured, see docs/log.md)."""


def function_bytes(shape: ExpertShape, device: str) -> int:
    """Bytes that an instance holds on a device, the padding of its memory layout included.

    Args:
        shape: The expert.
        device: A torch device name; only its kind matters, nothing is allocated on a GPU.
    """
    if not device.startswith("cpu"):
        return shape.num_bytes
    dtype = getattr(torch, shape.dtype)
    matrix = torch.zeros(shape.intermediate, shape.hidden, dtype=dtype)
    inner = torch.zeros(shape.intermediate, dtype=dtype) if shape.bias else None
    outer = torch.zeros(shape.hidden, dtype=dtype) if shape.bias else None
    blank = ExpertWeights(
        gate=matrix,
        up=matrix,
        down=matrix.t().contiguous(),
        gate_bias=inner,
        up_bias=inner,
        down_bias=outer,
    )
    return build_kernel(blank, device).num_bytes


class ExpertHost:
    """Instances on one device.

    Args:
        device: A torch device name.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stores: dict[str, ExpertStore] = {}
        self._activations: dict[str, Activation] = {}
        self._kernels: dict[tuple[str, int, int], ExpertKernel] = {}
        self._bytes: dict[FunctionId, int] = {}
        self._invoking = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all instances."""
        return sum(list(self._bytes.values()))

    def add_model(self, store: ExpertStore, spec: ModelSpec) -> int:
        """Register a model.

        Returns:
            Bytes that each of its instances will hold on this device.
        """
        self._stores[spec.model_id] = store
        self._activations[spec.model_id] = gated_activation(spec.expert)
        return function_bytes(spec.expert, self._device)

    def load(self, function: FunctionId) -> int:
        """Make an instance warm; blocks while its weights are read.

        Returns:
            Bytes that it holds.

        Raises:
            CheckpointError: The weights cannot be read.
            FunctionError: The model is unknown here, or memory ran out.
        """
        if function.model not in self._stores:
            raise FunctionError(f"{self._device} does not know the model {function.model}")
        store = self._stores[function.model]
        try:
            kernel = build_kernel(store.load(function.layer, function.expert), self._device)
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            reason = str(error).strip().partition("\n")[0] or "out of memory"
            raise FunctionError(f"{self._device} cannot hold {function}: {reason}") from error
        self._kernels[function] = kernel
        self._bytes[function] = kernel.num_bytes
        return kernel.num_bytes

    def evict(self, function: FunctionId) -> None:
        """Give up an instance, after the invocation that may be using it."""
        with self._invoking:
            self._kernels.pop(function, None)
            self._bytes.pop(function, None)

    def invoke(
        self,
        model: str,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments_n3: NDArray[np.int32],
        y_SH: torch.Tensor,
        status_n: NDArray[np.uint8],
    ) -> int:
        """Compute the rows of several instances of one layer.

        Args:
            model: Model id.
            layer: MoE layer.
            x_TH: Input rows.
            token_S: Which input row each assignment reads, assignments sorted by expert.
            segments_n3: (expert, start, stop) of each segment, in assignments.
            y_SH: Receives the expert's output of each assignment; other rows are untouched.
            status_n: Receives OK, NOT_WARM (nothing was computed) or FAILED per segment.

        Returns:
            Nanoseconds spent.
        """
        began_ns = time.monotonic_ns()
        segments = segments_n3.tolist()
        # Entering inference mode once more costs microseconds that add up over layers.
        inside = torch.is_inference_mode_enabled()
        with self._invoking, nullcontext() if inside else torch.inference_mode():
            kernels = [self._kernels.get((model, layer, s[0])) for s in segments]
            activation = self._activations[model]
            if self._run_together(kernels, segments, activation, x_TH, token_S, y_SH):
                status_n[:] = OK
            else:
                for i, (kernel, segment) in enumerate(zip(kernels, segments, strict=True)):
                    _, start, stop = segment
                    x = x_TH.index_select(0, token_S[start:stop])
                    status_n[i] = self._run_one(kernel, activation, x, y_SH[start:stop])
        return time.monotonic_ns() - began_ns

    def _run_one(
        self,
        kernel: ExpertKernel | None,
        activation: Activation,
        x_nH: torch.Tensor,
        y_nH: torch.Tensor,
    ) -> int:
        """Run one expert; returns its status."""
        if kernel is None:
            return NOT_WARM
        try:
            h = activation(kernel.gate_up(x_nH.to(self._device)))
            y_nH.copy_(kernel.down(h))
        except (RuntimeError, MemoryError):
            return FAILED
        return OK

    def _run_together(
        self,
        kernels: list[ExpertKernel | None],
        segments: list[list[int]],
        activation: Activation,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        y_SH: torch.Tensor,
    ) -> bool:
        """Run many small experts with one gather, one activation and one scatter.

        There the number of calls decides, not the arithmetic. Needs all experts warm and their
        rows adjacent.

        Returns:
            Whether it was done; if not, nothing has happened that matters.
        """
        first, last = segments[0][1], segments[-1][2]
        sizes = [stop - start for _, start, stop in segments]
        warm = [kernel for kernel in kernels if kernel is not None]
        if len(warm) < len(kernels) or sum(sizes) != last - first:
            return False
        if (last - first) * warm[0].inner_size > _TOGETHER_ELEMENTS:
            return False
        if self._device != "cpu" or x_TH.device.type != "cpu":
            return False
        if len(x_TH) == 1 and len(warm) == last - first:
            xs: Sequence[torch.Tensor] = [x_TH] * len(warm)
        else:
            xs = x_TH.index_select(0, token_S[first:last]).split_with_sizes(sizes)
        try:
            if warm[0].writes_in_place:
                h = torch.empty(last - first, warm[0].inner_size, dtype=x_TH.dtype)
                for kernel, x, out in zip(warm, xs, h.split_with_sizes(sizes), strict=True):
                    kernel.gate_up(x, out)
                inner = activation(h).split_with_sizes(sizes)
                ys = y_SH[first:last].split_with_sizes(sizes)
                for kernel, x, out in zip(warm, inner, ys, strict=True):
                    kernel.down(x, out)
            else:
                ups = [kernel.gate_up(x) for kernel, x in zip(warm, xs, strict=True)]
                inner = activation(torch.cat(ups)).split_with_sizes(sizes)
                downs = [kernel.down(h) for kernel, h in zip(warm, inner, strict=True)]
                torch.cat(downs, out=y_SH[first:last])
        except (RuntimeError, MemoryError):
            return False
        return True
