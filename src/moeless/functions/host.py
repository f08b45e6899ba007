"""The host of one device: it holds instances, and computes invocations on them.

A host does what the platform orders and what engines invoke; it decides nothing. Loads may run
in one thread while invocations run in another. Needs torch.
"""

import threading
import time

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import ExpertShape, FunctionId, ModelSpec
from moeless.errors import FunctionError
from moeless.functions.compute.kernels import ExpertKernel, build_kernel
from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.store.store import ExpertStore

OK, NOT_WARM, FAILED = 0, 1, 2
"""Status of one segment of an invocation."""


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
    return build_kernel(blank, shape, device).num_bytes


class ExpertHost:
    """Instances on one device.

    Args:
        device: A torch device name.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stores: dict[str, tuple[ExpertStore, ModelSpec]] = {}
        self._kernels: dict[FunctionId, ExpertKernel] = {}
        self._invoking = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all instances."""
        return sum(kernel.num_bytes for kernel in list(self._kernels.values()))

    def add_model(self, store: ExpertStore, spec: ModelSpec) -> int:
        """Register a model.

        Returns:
            Bytes that each of its instances will hold on this device.
        """
        self._stores[spec.model_id] = (store, spec)
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
        store, spec = self._stores[function.model]
        try:
            kernel = build_kernel(
                store.load(function.layer, function.expert), spec.expert, self._device
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise FunctionError(f"{self._device}: no memory for {function}") from error
        self._kernels[function] = kernel
        return kernel.num_bytes

    def evict(self, function: FunctionId) -> None:
        """Give up an instance, after the invocation that may be using it."""
        with self._invoking:
            self._kernels.pop(function, None)

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
        remote = y_SH.device.type != torch.device(self._device).type
        with self._invoking, torch.inference_mode():
            for i, (expert, start, stop) in enumerate(segments_n3.tolist()):
                kernel = self._kernels.get(FunctionId(model, layer, expert))
                if kernel is None:
                    status_n[i] = NOT_WARM
                    continue
                if stop - start == len(x_TH) == 1:
                    x = x_TH
                else:
                    x = x_TH.index_select(0, token_S[start:stop])
                try:
                    y = kernel(x.to(self._device) if remote else x)
                except (RuntimeError, MemoryError):
                    status_n[i] = FAILED
                    continue
                y_SH[start:stop].copy_(y)
                status_n[i] = OK
        return time.monotonic_ns() - began_ns
