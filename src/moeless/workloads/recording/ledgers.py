"""What is kept of recorded steps: one entry per step, or one per request.

Must not know engines; ``recorder`` has checked what comes here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moeless.workloads.recording.spool import Spool

Part = tuple[str, Literal["prefill", "decode"], int, int, tuple[int, ...]]
"""The tokens of one request in a step: request id, phase, how many, the position of the first in
the request's sequence, and which. Nothing but ``ConversationLedger`` looks at the last two."""


@dataclass(frozen=True, kw_only=True)
class RoutedShape:
    """L MoE layers, E logical experts, K experts per token."""

    num_layers: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """One step of an engine.

    Args:
        parts: Whose tokens it computed, in the order of the tokens.
        at_s: When it began.
        ids_TLK: The experts of every token, int16 [T, L, K].
        states_TLH: By name, hidden states of every token [T, L, H], if they are recorded.
    """

    parts: Sequence[Part]
    at_s: float
    ids_TLK: NDArray[np.int16]
    states_TLH: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def decode_tokens(self) -> int:
        """Tokens that were decoded; the others are prompt tokens."""
        return sum(tokens for _, phase, tokens, *_ in self.parts if phase == "decode")


class StepKeeper(Protocol):
    """Keeps what was recorded, on disk where it is large."""

    def add(self, step: RecordedStep) -> None:
        """Take a step."""
        ...

    def finish(self, request_id: str) -> None:
        """A request is complete."""
        ...

    def close(self) -> None:
        """Give temporary files up."""
        ...


class Ledger(StepKeeper, Protocol):
    """Keeps what becomes a routing trace."""

    def __len__(self) -> int:
        """Whole entries so far."""
        ...

    def fields(self) -> dict[str, Any]:
        """The fields of a ``RoutingTrace`` but ``meta``; call once, at the end."""
        ...


def count_loads(ids_TLK: NDArray[np.int16], shape: RoutedShape) -> NDArray[np.uint32]:
    """Tokens of each layer's experts, uint32 [L, E]."""
    layers, experts = shape.num_layers, shape.num_experts
    keys = ids_TLK + np.arange(layers, dtype=np.int64)[:, None] * experts
    counts = np.bincount(keys.ravel(), minlength=layers * experts)
    return counts.reshape(layers, experts).astype(np.uint32)


class StepLedger:
    """One entry per step.

    Args:
        shape: L, E and K.
        topk_ids: Whether the experts of every token are kept as well.
        folder: Where temporary files live.
    """

    def __init__(self, shape: RoutedShape, *, topk_ids: bool, folder: Path) -> None:
        self._shape = shape
        self._loads = Spool((shape.num_layers, shape.num_experts), np.uint32, folder)
        self._ids = Spool((shape.num_layers, shape.top_k), np.int16, folder) if topk_ids else None
        self._tokens: list[int] = []
        self._decode_tokens: list[int] = []
        self._at_s: list[float] = []

    def __len__(self) -> int:
        """Steps so far."""
        return len(self._tokens)

    def add(self, step: RecordedStep) -> None:
        """Take a step."""
        self._loads.append(count_loads(step.ids_TLK, self._shape)[None])
        if self._ids is not None:
            self._ids.append(step.ids_TLK)
        self._decode_tokens.append(step.decode_tokens)
        self._at_s.append(step.at_s)
        self._tokens.append(len(step.ids_TLK))

    def finish(self, request_id: str) -> None:
        """Nothing to do: steps are whole by themselves."""

    def fields(self) -> dict[str, Any]:
        """Fields of the trace; times count from the first step."""
        at_s = np.array(self._at_s, dtype=np.float64)
        # Where the disk became full within a step, its rows may be there in part.
        fields = {
            "loads_NLE": self._loads.read()[: len(self)],
            "tokens_N": np.array(self._tokens, dtype=np.int32),
            "decode_tokens_N": np.array(self._decode_tokens, dtype=np.int32),
            "time_s_N": at_s - at_s[:1],
        }
        if self._ids is not None:
            fields["topk_ids_TLK"] = self._ids.read()[: sum(self._tokens)]
            fields["topk_offsets"] = _offsets(fields["tokens_N"])
        return fields

    def close(self) -> None:
        """Give temporary files up."""
        _close(self._loads, self._ids)


@dataclass(kw_only=True, slots=True)
class _Open:
    """A request that is not complete yet."""

    number: int
    load_LE: NDArray[np.uint32]
    tokens: int = 0
    decode_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class _Finished:
    """The small fields of complete requests, in the order in which they finished."""

    number: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)


class RequestLedger:
    """One entry per complete request, in the order in which requests first had tokens computed.

    Args:
        shape: L, E and K.
        topk_ids: Whether the experts of every token are kept as well.
        folder: Where temporary files live.
    """

    def __init__(self, shape: RoutedShape, *, topk_ids: bool, folder: Path) -> None:
        self._shape = shape
        self._loads = Spool((shape.num_layers, shape.num_experts), np.uint32, folder)
        self._ids: Spool | None = None
        self._owner: Spool | None = None
        if topk_ids:
            self._ids = Spool((shape.num_layers, shape.top_k), np.int16, folder)
            self._owner = Spool((), np.int64, folder)
        self._open: dict[str, _Open] = {}
        self._started = 0
        self._finished = _Finished()

    def __len__(self) -> int:
        """Complete requests so far."""
        return len(self._finished.number)

    def add(self, step: RecordedStep) -> None:
        """Take a step: each part counts for its request."""
        first = 0
        for request_id, phase, tokens, *_ in step.parts:
            ids_TLK = step.ids_TLK[first : first + tokens]
            first += tokens
            entry = self._open.get(request_id) or self._begin(request_id)
            entry.load_LE += count_loads(ids_TLK, self._shape)
            entry.tokens += tokens
            entry.decode_tokens += tokens if phase == "decode" else 0
            if self._ids is not None and self._owner is not None:
                self._ids.append(ids_TLK)
                self._owner.append(np.full(tokens, entry.number))

    def finish(self, request_id: str) -> None:
        """A request is complete; one that never had a token computed leaves no entry."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        self._loads.append(entry.load_LE[None])
        self._finished.tokens.append(entry.tokens)
        self._finished.decode_tokens.append(entry.decode_tokens)
        self._finished.number.append(entry.number)

    def fields(self) -> dict[str, Any]:
        """Fields of the trace."""
        done = self._finished
        order = np.argsort(np.array(done.number, dtype=np.int64))
        fields = {
            "loads_NLE": self._loads.read_in_order(order),
            "tokens_N": np.array(done.tokens, dtype=np.int32)[order],
            "decode_tokens_N": np.array(done.decode_tokens, dtype=np.int32)[order],
        }
        if self._ids is not None and self._owner is not None:
            owner_T = self._owner.read()
            kept_T = np.flatnonzero(np.isin(owner_T, done.number))
            by_owner = kept_T[np.argsort(owner_T[kept_T], kind="stable")]
            fields["topk_ids_TLK"] = self._ids.read_in_order(by_owner)
            fields["topk_offsets"] = _offsets(fields["tokens_N"])
        return fields

    def close(self) -> None:
        """Give temporary files up."""
        _close(self._loads, self._ids, self._owner)

    def _begin(self, request_id: str) -> _Open:
        shape = (self._shape.num_layers, self._shape.num_experts)
        entry = _Open(number=self._started, load_LE=np.zeros(shape, dtype=np.uint32))
        self._started += 1
        self._open[request_id] = entry
        return entry


def _offsets(tokens_N: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(tokens_N, dtype=np.int64)])


def _close(*spools: Spool | None) -> None:
    for spool in spools:
        if spool is not None:
            spool.close()
