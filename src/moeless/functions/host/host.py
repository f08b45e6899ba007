"""The host of one device: it holds instances, and computes invocations on them.

A host does what the platform orders and what engines invoke; it decides nothing. Loads may run
in one thread while invocations run in another. Needs torch.
"""

import contextlib
import math
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import ExpertShape, FunctionId, ModelSpec
from moeless.errors import CheckpointError, FunctionError
from moeless.functions.compute.background import work_in_background
from moeless.functions.compute.bfloat16_products import loops_fit
from moeless.functions.compute.kernels import (
    Activation,
    ExpertKernel,
    build_kernel,
    build_stacked_kernel,
    is_packed,
    is_stacked,
    keeps_weights,
    packed_linear,
)
from moeless.functions.compute.padded import small_activation
from moeless.functions.compute.row_products import prepare_row_loops
from moeless.functions.compute.rows import Rows
from moeless.functions.compute.together import run_together
from moeless.functions.compute.weight_stack import WeightStack
from moeless.functions.compute.workspace import Workspace
from moeless.functions.host.headroom import SMALL_BYTES, invocation_bytes, require_room
from moeless.functions.links.segment_status import FAILED, NOT_WARM, OK
from moeless.functions.store.digest import digest_weights
from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.store.read_memory import ReadMemory
from moeless.functions.store.store import ExpertStore

_FETCHED_FROM_BYTES = 1 << 20
"""Size of an expert from which fetching ahead saves more time than it takes."""


def function_bytes(shape: ExpertShape, device: str) -> int:
    """Bytes that an instance holds on a device, the padding of its memory layout included.

    Args:
        shape: The expert.
        device: A torch device name; only its kind matters, nothing is allocated on a GPU.
    """
    if not is_packed(shape, device):
        return shape.num_bytes
    dtype: torch.dtype = getattr(torch, shape.dtype)
    sizes = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    # One after the other: where this finds memory, an instance does, too, or nearly so.
    packed_bytes = sum(packed_linear(torch.zeros(size, dtype=dtype), None)[1] for size in sizes)
    weights_bytes = sum(math.prod(size) for size in sizes) * dtype.itemsize
    return packed_bytes + shape.num_bytes - weights_bytes


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or "out of memory"


class ExpertHost:
    """Instances on one device.

    Args:
        device: A torch device name.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stores: dict[str, ExpertStore] = {}
        self._specs: dict[str, ModelSpec] = {}
        self._stacks: dict[tuple[str, int], WeightStack] = {}
        self._activations: dict[str, Activation] = {}
        self._kernels: dict[tuple[str, int, int], ExpertKernel] = {}
        self._bytes: dict[FunctionId, int] = {}
        self._function_bytes: dict[str, int] = {}
        self._digests: dict[FunctionId, str] = {}
        self._rows: dict[str, int] = {}  # the most that an invocation may have
        self._read_memory = ReadMemory()
        self._as_read: dict[FunctionId, ExpertWeights] = {}
        self._workspace = Workspace()
        self._invoking = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all instances."""
        return sum(list(self._bytes.values()))

    def add_model(self, store: ExpertStore, spec: ModelSpec) -> int:
        """Register a model.

        Returns:
            Bytes that each of its instances will hold on this device.

        Raises:
            FunctionError: There is not even memory for one of them.
        """
        try:
            # For finding out what an instance holds.
            require_room(3 * spec.expert.num_bytes // 2, self._headroom_bytes())
        except MemoryError as error:
            raise self._cannot_hold(spec.model_id, error) from error
        self._stores[spec.model_id] = store
        self._specs[spec.model_id] = spec
        self._activations[spec.model_id] = small_activation(spec.expert, self._device)
        prepare_row_loops(spec.expert, self._device)
        if is_stacked(spec.expert, self._device):
            loops_fit(spec.expert)  # compiles them before a token needs them
        try:
            num_bytes = function_bytes(spec.expert, self._device)
        except (MemoryError, RuntimeError) as error:
            raise self._cannot_hold(spec.model_id, error) from error
        self._function_bytes[spec.model_id] = num_bytes
        return num_bytes

    def expect_rows(self, model: str, rows: int) -> None:
        """An engine may invoke instances of a model with so many rows: loads leave room for it."""
        self._rows[model] = max(rows, self._rows.get(model, 0))

    def should_fetch(self, function: FunctionId) -> bool:
        """Whether fetching a function ahead of its load pays; small ones are expected."""
        spec = self._specs.get(function.model)
        return spec is not None and spec.expert.num_bytes >= _FETCHED_FROM_BYTES

    def takes_pages(self, function: FunctionId) -> bool:
        """Whether a load allocates blocks for the weights: small ones have their layer's stack."""
        spec = self._specs.get(function.model)
        return spec is not None and not is_stacked(spec.expert, self._device)

    def expect(self, functions: Sequence[FunctionId]) -> None:
        """Small functions will be loaded soon: have the system begin to read them."""
        experts: dict[tuple[str, int], list[int]] = {}
        for model, layer, expert in functions:
            experts.setdefault((model, layer), []).append(expert)
        for (model, layer), those in experts.items():
            if model in self._stores:
                self._stores[model].expect(layer, those)

    def fetch(self, function: FunctionId) -> None:
        """A function will be loaded soon: have its bytes read into the system's memory."""
        store = self._stores.get(function.model)
        if store is not None and function not in self._kernels:
            store.fetch(function.layer, function.expert)

    def rest(self) -> None:
        """No load follows for now: give back what is only needed for loads."""
        self._read_memory.release()

    def load(self, function: FunctionId, *, digest: str | None = None) -> int:
        """Make an instance warm unless it is; blocks while its weights are read.

        Args:
            function: Which one.
            digest: Of its weights when somebody first loaded it; None if nobody else has.

        Returns:
            Bytes that it holds.

        Raises:
            CheckpointError: The weights cannot be read, or are not those that were loaded before.
            FunctionError: The model is unknown here, or memory ran out.
        """
        if function.model not in self._stores:
            raise FunctionError(f"{self._device} does not know the model {function.model}")
        if function in self._kernels:
            return self._bytes[function]
        store = self._stores[function.model]
        try:
            require_room(self._needed_bytes(function), self._headroom_bytes())
            work_in_background()
            memory = self._memory_for(self._specs[function.model].expert)
            weights = store.load(function.layer, function.expert, memory=memory)
            self._check(function, digest_weights(weights), digest)
            kernel = self._build(function, weights, memory)
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            raise self._cannot_hold(function, error) from error
        self._kernels[function] = kernel
        self._bytes[function] = self._function_bytes[function.model]
        return self._bytes[function]

    def lay_out_next(self) -> bool:
        """Give one instance that is still as it was read the layout that computes faster.

        In the thread that loads, when no load waits.

        Returns:
            Whether there was one.
        """
        if not self._as_read:
            return False
        function = next(iter(self._as_read))
        weights = self._as_read.pop(function)
        # Without memory for the other layout it stays as it is.
        with contextlib.suppress(MemoryError, RuntimeError):
            require_room(self._function_bytes[function.model], self._headroom_bytes())
            self._kernels[function] = build_kernel(weights, self._device)
        return True

    def digest(self, function: FunctionId) -> str:
        """The fingerprint of an instance's weights, which must have been loaded once."""
        return self._digests[function]

    def _check(self, function: FunctionId, found: str, known: str | None) -> None:
        known = self._digests.setdefault(function, known or found)
        if found != known:
            raise CheckpointError(
                f"{function.model}: the weights of layer {function.layer}, expert "
                f"{function.expert} are not those that were served before: a file of the "
                f"checkpoint was changed; restore it, or restart with the new one"
            )

    def _cannot_hold(self, what: object, error: Exception) -> FunctionError:
        return FunctionError(f"{self._device} cannot hold {what}: {_first_line(error)}")

    def _headroom_bytes(self) -> int:
        """What a load must leave to everything else."""
        if not self._device.startswith("cpu"):
            return SMALL_BYTES
        rows = [
            invocation_bytes(self._specs[model].expert, rows)
            for model, rows in self._rows.items()
            if model in self._specs
        ]
        return SMALL_BYTES + max(rows, default=0)

    def _needed_bytes(self, function: FunctionId) -> int:
        """The most that a load allocates."""
        spec, read_bytes = self._specs[function.model], self._stores[function.model].load_bytes
        laid_out_bytes = self._function_bytes[function.model]
        if is_packed(spec.expert, self._device) and read_bytes <= laid_out_bytes:
            return read_bytes  # it stays as it was read for now
        needed = read_bytes + laid_out_bytes
        if is_stacked(spec.expert, self._device) and (
            (function.model, function.layer) not in self._stacks
        ):
            needed += spec.num_experts * spec.expert.num_bytes
        return needed

    def _memory_for(self, shape: ExpertShape) -> ReadMemory | None:
        """Where an expert is read to; None for memory of its own."""
        if keeps_weights(shape, self._device):
            return None
        # What is packed later stays where it was read to until then.
        return ReadMemory(shape.num_bytes) if is_packed(shape, self._device) else self._read_memory

    def _build(
        self, function: FunctionId, weights: ExpertWeights, memory: ReadMemory | None
    ) -> ExpertKernel:
        spec = self._specs[function.model]
        if is_packed(spec.expert, self._device) and memory is not None:
            # Unless that takes more than the instance may hold, as where weights are decoded.
            limit = self._function_bytes[function.model]
            as_read = weights.is_joined and memory.needed_bytes <= limit
            if as_read:
                self._as_read[function] = weights
            return build_kernel(weights, self._device, as_read=as_read)
        if not is_stacked(spec.expert, self._device):
            return build_kernel(weights, self._device)
        key = (function.model, function.layer)
        if key not in self._stacks:
            input_major = loops_fit(spec.expert)
            stack = WeightStack(spec.expert, spec.num_experts, input_major=input_major)
            self._stacks[key] = stack
        return build_stacked_kernel(weights, self._stacks[key])

    def evict(self, function: FunctionId) -> None:
        """Give up an instance, after the invocation that may be using it."""
        with self._invoking:
            kernel = self._kernels.pop(function, None)
            self._bytes.pop(function, None)
            self._as_read.pop(function, None)
            if kernel is not None and kernel.slot is not None:
                kernel.slot.give_back()

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
        # Entering inference mode once more costs microseconds that add up over layers.
        inside = torch.is_inference_mode_enabled()
        with self._invoking, contextlib.nullcontext() if inside else torch.inference_mode():
            warm: list[int] = []
            kernels: list[ExpertKernel] = []
            ranges_n2: list[tuple[int, int]] = []
            for i, (expert, start, stop) in enumerate(segments_n3.tolist()):
                kernel = self._kernels.get((model, layer, expert))
                if kernel is not None:
                    warm.append(i)
                    kernels.append(kernel)
                    ranges_n2.append((start, stop))
            rows = Rows(x_TH=x_TH, token_S=token_S, y_SH=y_SH)
            activation = self._activations[model]
            together = bool(warm) and self._run_together(kernels, ranges_n2, activation, rows)
            if together and len(warm) == len(status_n):
                status_n[:] = OK
                return time.monotonic_ns() - began_ns
            status_n[:] = NOT_WARM
            if together:
                status_n[warm] = OK
            else:
                for i, kernel, (start, stop) in zip(warm, kernels, ranges_n2, strict=True):
                    status_n[i] = self._run_one(kernel, start, stop, activation, rows)
        return time.monotonic_ns() - began_ns

    def _run_together(
        self,
        kernels: list[ExpertKernel],
        ranges_n2: list[tuple[int, int]],
        activation: Activation,
        rows: Rows,
    ) -> bool:
        """Run all experts at once; returns whether it was done."""
        if self._device != "cpu" or rows.x_TH.device.type != "cpu":
            return False
        try:
            return run_together(kernels, ranges_n2, activation, rows, self._workspace)
        except (RuntimeError, MemoryError):
            return False

    def _run_one(
        self, kernel: ExpertKernel, start: int, stop: int, activation: Activation, rows: Rows
    ) -> int:
        """Run one expert; returns its status."""
        x_TH, token_n, y_nH = rows.x_TH, rows.token_S[start:stop], rows.y_SH[start:stop]
        try:
            if self._device != "cpu" or x_TH.device.type != "cpu":
                x_nH = x_TH.index_select(0, token_n).to(self._device)
                y_nH.copy_(kernel.down(activation(kernel.gate_up(x_nH))))
                return OK
            x_nH = self._workspace.take("x", len(token_n), x_TH.shape[1], dtype=x_TH.dtype)
            torch.index_select(x_TH, 0, token_n, out=x_nH)
            kernel.down(activation(kernel.gate_up(x_nH)), y_nH)
        except (RuntimeError, MemoryError):
            return FAILED
        return OK
