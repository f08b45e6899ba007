"""The host of one device: it holds instances, and computes invocations on them.

A host does what the platform orders and what engines invoke; it decides nothing. Loads may run
in one thread while invocations run in another. Needs torch.
"""

import contextlib
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import FunctionId, ModelSpec
from moeless.errors import CheckpointError, FunctionError
from moeless.functions.compute.background import work_in_background
from moeless.functions.compute.experts import Experts, experts_on
from moeless.functions.host.headroom import SMALL_BYTES, invocation_bytes, require_room
from moeless.functions.store.digest import digest_weights
from moeless.functions.store.read_memory import ReadMemory
from moeless.functions.store.store import ExpertStore

_FETCHED_FROM_BYTES = 1 << 20
"""Size of an expert from which fetching ahead saves more time than it takes."""


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
        self._experts: dict[str, Experts] = {}
        self._warm: set[FunctionId] = set()
        self._resident_bytes = 0
        self._digests: dict[FunctionId, str] = {}
        self._rows: dict[str, int] = {}  # the most that an invocation may have
        self._read_memory = ReadMemory()
        self._invoking = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all instances."""
        return self._resident_bytes

    def add_model(self, store: ExpertStore, spec: ModelSpec) -> int:
        """Register a model.

        Returns:
            Bytes that each of its instances will hold on this device.
        """
        experts = experts_on(spec, self._device)  # compiles loops before a token needs them
        self._stores[spec.model_id] = store
        self._specs[spec.model_id] = spec
        self._experts[spec.model_id] = experts
        return experts.function_bytes

    def expect_rows(self, model: str, rows: int) -> None:
        """An engine may invoke instances of a model with so many rows: loads leave room for it."""
        self._rows[model] = max(rows, self._rows.get(model, 0))

    def should_fetch(self, function: FunctionId) -> bool:
        """Whether fetching a function ahead of its load pays; small ones are expected."""
        spec = self._specs.get(function.model)
        return spec is not None and spec.expert.num_bytes >= _FETCHED_FROM_BYTES

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
        if store is not None and function not in self._warm:
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
        experts = self._experts[function.model]
        if function in self._warm:
            return experts.function_bytes
        store = self._stores[function.model]
        try:
            require_room(store.load_bytes + experts.function_bytes, self._headroom_bytes())
            work_in_background()
            weights = store.load(function.layer, function.expert, memory=self._read_memory)
            self._check(function, digest_weights(weights), digest)
            experts.put(function.layer, function.expert, weights)
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            raise self._cannot_hold(function, error) from error
        self._warm.add(function)
        self._resident_bytes += experts.function_bytes
        return experts.function_bytes

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

    def evict(self, function: FunctionId) -> None:
        """Give up an instance, after the invocation that may be using it."""
        with self._invoking:
            if function in self._warm:
                experts = self._experts[function.model]
                experts.drop(function.layer, function.expert)
                self._warm.remove(function)
                self._resident_bytes -= experts.function_bytes

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
            self._experts[model].run(
                layer,
                x_TH=x_TH,
                token_S=token_S,
                segments_n3=segments_n3,
                y_SH=y_SH,
                status_n=status_n,
            )
        return time.monotonic_ns() - began_ns
