"""Finds the tokens of a routing trace in a recording of gate inputs.

Tokens are told apart by the experts that they chose in all layers. Where two chose the same in
every one, they are the same token or saw the same text, and a predictor expects the same of both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.learned.batching import UNUSED
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows
from moeless.workloads.routing_trace import RoutingTrace

_LEAST_MATCHED = 0.5
"""Share of a trace's entries that must be found in the recording."""


class TokenUses:
    """Which entries each recorded token is in: none, one or several.

    Args:
        row: Number of a recorded token.
        entry: An entry that it is in; pairs in any order.
    """

    def __init__(self, row: NDArray[np.int64], entry: NDArray[np.int64]) -> None:
        order = np.argsort(row, kind="stable")
        self._row, self._entry = row[order], entry[order]

    def between(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, counted from the first, and their entries."""
        low, high = np.searchsorted(self._row, [first, stop])
        return (
            torch.from_numpy(self._row[low:high] - first),
            torch.from_numpy(self._entry[low:high]),
        )


def match_trace(
    trace: RoutingTrace, path: Path, shards: GateShards, rows: TokenRows
) -> tuple[RoutingTrace, TokenUses, int]:
    """Find the tokens of a trace in the recording.

    Args:
        trace: The trace.
        path: Where it was read from, for messages.
        shards: The recording.
        rows: Its tokens.

    Returns:
        The trace with those entries only whose tokens were all found, where they are, and how
        many entries were left out.

    Raises:
        TraceError: The trace has no expert ids, is of another model, or of another run.
    """
    known, meta = shards.manifest, trace.meta
    mine = (known.num_layers, known.num_experts, known.top_k)
    theirs = (meta.num_layers, meta.num_experts, meta.top_k)
    if mine != theirs:
        raise TraceError(
            f"{path} is of {meta.model} with (layers, experts, top-k) {theirs}, but "
            f"{shards.directory} of {known.model} with {mine}"
        )
    if trace.topk_ids_TLK is None or trace.topk_offsets is None:
        raise TraceError(
            f"{path} has no topk_ids to match tokens by; record it with --topk-ids in the run "
            "that records the gate inputs, or leave --routing out"
        )
    found: dict[bytes, int] = {}
    first = 0
    for chunk in rows:
        ids = torch.stack([chunk.topk_ids(layer) for layer in range(known.num_layers)], dim=1)
        for row, key in enumerate(_keys(ids.numpy()), start=first):
            found.setdefault(key, row)
        first += len(ids)
    row_T = np.array([found.get(key, UNUSED) for key in _keys(trace.topk_ids_TLK)], dtype=np.int64)
    entry_T = np.repeat(np.arange(len(trace)), np.diff(trace.topk_offsets))
    missing = np.bincount(entry_T[row_T == UNUSED], minlength=len(trace)) > 0
    kept = np.flatnonzero(~missing)
    if len(kept) < _LEAST_MATCHED * len(trace):
        raise TraceError(
            f"only {len(kept)} of {len(trace)} {meta.unit} of {path} are wholly in "
            f"{shards.directory}; record both in one run, or leave --routing out"
        )
    inside = ~missing[entry_T]
    number = np.cumsum(~missing) - 1
    uses = TokenUses(row_T[inside], number[entry_T[inside]])
    return _select(trace, kept, inside), uses, int(missing.sum())


def _keys(ids_TLK: NDArray[Any]) -> list[bytes]:
    """The experts of a token, whatever their order."""
    ordered = np.sort(ids_TLK.astype(np.int16), axis=-1)
    return [row.tobytes() for row in ordered]


def _select(
    trace: RoutingTrace, kept: NDArray[np.int64], inside: NDArray[np.bool_]
) -> RoutingTrace:
    assert trace.topk_ids_TLK is not None
    tokens_N = trace.tokens_N[kept]

    def pick(values: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values is None else values[kept]

    return replace(
        trace,
        loads_NLE=trace.loads_NLE[kept],
        tokens_N=tokens_N,
        time_s_N=pick(trace.time_s_N),
        decode_tokens_N=pick(trace.decode_tokens_N),
        group_N=pick(trace.group_N),
        topk_ids_TLK=trace.topk_ids_TLK[inside],
        topk_offsets=np.concatenate([[0], np.cumsum(tokens_N, dtype=np.int64)]),
        predicted_NLE=None,
        meta=replace(trace.meta, predictor=None),
    )
