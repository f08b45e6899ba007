"""Turns what a token path and a step loop report into a routing trace.

The step loop says whose tokens the next forward computes, each MoE layer says where its gate sent
them, and the step loop says whether the step counts. Whatever is seen outside a step (warm-up,
probes) or in a step that fails is left out; a layer that sees more or fewer tokens than the step
has (padding) ends the recording. Numpy only; must not know which engine reports.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import MoelessError, TraceError, os_reason
from moeless.workloads.recording.ledgers import (
    Ledger,
    Part,
    RecordedStep,
    RoutedShape,
    StepKeeper,
)
from moeless.workloads.routing_trace import RoutingTrace
from moeless.workloads.trace_meta import TraceMeta, Unit


class RoutingRecorder:
    """Records one model's routing.

    Args:
        shape: L, E and K.
        ledger: Keeps what becomes the trace; None if no trace is wanted.
        keepers: Others that keep something of each step.
        states: Names of the hidden states that ``observe_state`` will tell of.

    ``begin_step``, ``observe``, ``observe_state`` and ``keep_step`` are called on the engine's
    thread and do not raise: the first failure is kept in ``failure`` and ends the recording.
    Everything else may be called from another thread.
    """

    def __init__(
        self,
        shape: RoutedShape,
        ledger: Ledger | None,
        *,
        keepers: Sequence[StepKeeper] = (),
        states: Sequence[str] = (),
    ) -> None:
        self._shape = shape
        self._ledger = ledger
        self._keepers = (*(() if ledger is None else (ledger,)), *keepers)
        self._states = tuple(states)
        self._states_seen: dict[str, list[list[NDArray[Any]]]] = {}
        self._lock = threading.Lock()
        self._parts: Sequence[Part] | None = None
        self._at_s = 0.0
        self._seen_L: list[list[NDArray[np.int16]]] = []
        self._stopped = False
        self.steps = 0
        self.tokens = 0
        self.decode_tokens = 0
        self.failure: MoelessError | None = None

    def __len__(self) -> int:
        """Whole entries of the trace so far: steps or requests."""
        with self._lock:
            return 0 if self._ledger is None else len(self._ledger)

    def finish(self, request_id: str) -> None:
        """Say that a request is complete.

        Raises:
            TraceError: What was recorded of it cannot be kept.
        """
        with self._lock:
            if self._stopped:
                return
            try:
                for keeper in self._keepers:
                    keeper.finish(request_id)
            except OSError as error:
                self._stopped = True
                raise _disk_failure(error) from error

    def begin_step(self, parts: Sequence[Part], at_s: float) -> None:
        """The next forward computes these tokens; see ``generation.StepRecorder``."""
        self._parts = parts
        self._at_s = at_s
        self._seen_L = [[] for _ in range(self._shape.num_layers)]
        self._states_seen = {
            name: [[] for _ in range(self._shape.num_layers)] for name in self._states
        }

    def observe(self, layer: int, ids_TK: NDArray[np.int64]) -> None:
        """A layer's gate sent tokens to these experts, [T, K]; ignored outside a step."""
        if self._parts is not None:
            self._seen_L[layer].append(ids_TK.astype(np.int16))

    @property
    def in_step(self) -> bool:
        """Whether what is observed now belongs to a step."""
        return self._parts is not None

    def observe_state(self, layer: int, name: str, state_TH: NDArray[Any]) -> None:
        """A hidden state of a layer's tokens, [T, H]; ignored outside a step."""
        if self._parts is not None:
            self._states_seen[name][layer].append(state_TH)

    def fail(self, error: MoelessError) -> None:
        """Whoever observes cannot go on: end the recording. Called on the engine's thread."""
        with self._lock:
            self._fail(error)

    def keep_step(self) -> None:
        """The step that began last counts."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        with self._lock:
            if self._stopped:
                return
            try:
                states = {
                    name: _stack(seen_L, parts, f"{name} of step {self.steps}")
                    for name, seen_L in self._states_seen.items()
                }
                step = RecordedStep(
                    parts=parts, at_s=self._at_s, ids_TLK=self._join(parts), states_TLH=states
                )
                for keeper in self._keepers:
                    keeper.add(step)
            except TraceError as error:
                self._fail(error)
            except OSError as error:
                self._fail(_disk_failure(error))
            else:
                self.steps += 1
                self.tokens += len(step.ids_TLK)
                self.decode_tokens += step.decode_tokens

    def stop(self) -> None:
        """Take nothing more; a step in progress is left out."""
        with self._lock:
            self._stopped = True

    def trace(
        self, *, model: str, layer_ids: tuple[int, ...], unit: Unit, group: str, **about: Any
    ) -> RoutingTrace:
        """What was recorded; call after ``stop``.

        Args:
            model: Name of the model.
            layer_ids: The model's own index of each MoE layer.
            unit: What the ledger's entries are.
            group: The label of all entries.
            about: Further fields of ``TraceMeta``: source, licence, extra.

        Raises:
            TraceError: Nothing was recorded, or the disk is full.
        """
        assert self._ledger is not None, "no trace was asked for"
        try:
            fields = self._ledger.fields()
        except OSError as error:
            raise _disk_failure(error) from error
        meta = TraceMeta(
            model=model,
            num_layers=self._shape.num_layers,
            num_experts=self._shape.num_experts,
            top_k=self._shape.top_k,
            layer_ids=layer_ids,
            unit=unit,
            phase=_name_phase(fields["tokens_N"], fields["decode_tokens_N"]),
            **about,
        )
        group_N = np.full(len(fields["tokens_N"]), group)
        return RoutingTrace(meta=meta, group_N=group_N, **fields)

    def close(self) -> None:
        """Give temporary files up."""
        self.stop()
        for keeper in self._keepers:
            keeper.close()

    def _join(self, parts: Sequence[Part]) -> NDArray[np.int16]:
        return _stack(self._seen_L, parts, f"step {self.steps}")

    def _fail(self, error: MoelessError) -> None:
        self._stopped = True
        self.failure = self.failure or error


def _stack(seen_L: list[list[NDArray[Any]]], parts: Sequence[Part], what: str) -> NDArray[Any]:
    """One row per token from what each layer reported in one or several pieces: [T, L, ...]."""
    tokens = sum(count for _, _, count, *_ in parts)
    for layer, pieces in enumerate(seen_L):
        seen = sum(len(piece) for piece in pieces)
        if seen != tokens:
            raise TraceError(
                f"{what}: MoE layer {layer} routed {seen} tokens, but the step has {tokens}; "
                "padding or a skipped layer would falsify the trace, so recording ended here"
            )
    return np.stack([np.concatenate(pieces) for pieces in seen_L], axis=1)


def _disk_failure(error: OSError) -> TraceError:
    return TraceError(
        f"temporary files of the recording cannot be written ({os_reason(error)}); make "
        "room beside the trace, or record fewer prompts"
    )


def _name_phase(tokens_N: NDArray[np.int32], decode_tokens_N: NDArray[np.int32]) -> str:
    decoded = int(decode_tokens_N.sum())
    if decoded == 0:
        return "prefill"
    return "decode" if decoded == int(tokens_N.sum()) else "mixed"
