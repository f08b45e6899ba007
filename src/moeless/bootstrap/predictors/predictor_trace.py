"""Adds what a predictor expects to routing traces, so that ``replay`` can use it.

A trace of the same run is matched token by token; without one, a trace is made of the recorded
tokens themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.bootstrap.predictors.predictor import divide
from moeless.bootstrap.predictors.predictor_matching import TokenUses, match_trace
from moeless.errors import TraceError
from moeless.learned.batching import UNUSED, Batching, batch_tokens
from moeless.learned.load_predictor import finish_load
from moeless.learned.predictor_file import load_predictor, recording_digest
from moeless.learned.predictor_manifest import PredictorManifest
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows
from moeless.learned.trained_predictor import TrainedPredictor
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta, read_trace, write_trace

_STEP_S = 0.1
"""Time between steps of a trace made of tokens; nothing was timed."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ApplyReport:
    """What became of a trace.

    Args:
        entries: Entries with expected loads.
        dropped: Entries of the trace that the recording does not hold whole.
        tokens: Tokens of those kept.
        fitted_share: Share of the recording's tokens that the predictor was fitted to.
    """

    entries: int
    dropped: int
    tokens: int
    fitted_share: float


def apply_predictor(
    directory: Path,
    shards: GateShards,
    out: Path,
    *,
    routing: Path | None = None,
    batch: int = 256,
    batching: Batching = "recorded",
    on_progress: Progress = lambda *_: None,
) -> ApplyReport:
    """Write a routing trace with ``predicted``.

    Args:
        directory: The predictor.
        shards: Gate inputs.
        out: Where to.
        routing: A trace with ``topk_ids`` of the same run; entries that are not wholly in the
            recording are left out. None makes steps of recorded tokens: of the conversations
            that were kept from fitting, if it is the recording that was fitted to.
        batch: Tokens of a step that is made.
        batching: How tokens are put together.
        on_progress: Told how many tokens are done, and of how many.

    Raises:
        CheckpointError: The predictor is damaged.
        ConfigError: It is that of another model.
        TraceError: Trace and recording do not belong together, or there is too little.
    """
    predictor, manifest = load_predictor(
        directory, gates=shards.gates, model=shards.manifest.model
    )
    same = manifest.recorded.get("sha256") == recording_digest(shards.manifest)
    fit, held_out = divide(shards, manifest) if same else (frozenset(), frozenset())
    if routing is None:
        rows = TokenRows(shards, held_out if same else shards.conversations, reads=predictor.reads)
        trace = _make_trace(shards, rows, batch=batch, batching=batching)
        step_T = _steps_of(rows, batch, batching)
        fitted, dropped = 0.0, 0
    else:
        rows = TokenRows(shards, shards.conversations, reads=predictor.reads)
        trace, step_T, dropped = match_trace(read_trace(routing), routing, shards, rows)
        fitted = float(np.isin(rows.conversation, sorted(fit)).mean())
    share_NLE = _sum_shares(predictor, shards, rows, step_T, len(trace), on_progress)
    described = _with_predicted(trace, share_NLE, predictor, manifest)
    write_trace(described, out)
    return ApplyReport(
        entries=len(described),
        dropped=dropped,
        tokens=int(described.tokens_N.sum()),
        fitted_share=fitted,
    )


def _steps_of(rows: TokenRows, batch: int, batching: Batching) -> TokenUses:
    batch_T = batch_tokens(
        rows.conversation, rows.position, rows.decode, size=batch, batching=batching
    )
    used = np.flatnonzero(batch_T != UNUSED)
    return TokenUses(used, batch_T[used])


def _make_trace(
    shards: GateShards, rows: TokenRows, *, batch: int, batching: Batching
) -> RoutingTrace:
    known = shards.manifest
    batch_T = batch_tokens(
        rows.conversation, rows.position, rows.decode, size=batch, batching=batching
    )
    used = batch_T != UNUSED
    if not used.any():
        raise TraceError(
            f"{rows.tokens} recorded tokens make no {batching} step of {batch}; record more, or "
            "use smaller steps"
        )
    count = int(batch_T.max()) + 1
    loads = np.zeros((count, known.num_layers, known.num_experts), dtype=np.uint32)
    first = 0
    for chunk in rows:
        for layer in range(known.num_layers):
            ids_TK = chunk.topk_ids(layer).numpy()
            step_T = batch_T[first : first + len(ids_TK)]
            kept = step_T != UNUSED
            np.add.at(loads[:, layer], (step_T[kept][:, None], ids_TK[kept]), 1)
        first += len(ids_TK)
    prompts = str(known.prompts.get("source", "unknown"))
    decoded = np.bincount(batch_T[used], weights=rows.decode[used], minlength=count)
    return RoutingTrace(
        meta=TraceMeta(
            model=known.model,
            num_layers=known.num_layers,
            num_experts=known.num_experts,
            top_k=known.top_k,
            layer_ids=known.layer_ids,
            unit="steps",
            phase="decode" if batching == "decode" else "mixed",
            source=f"steps of {batch} recorded tokens of the prompts {prompts}, put together "
            f"{batching}, {_STEP_S} s apart",
            licence="not stated",
        ),
        loads_NLE=loads,
        tokens_N=np.bincount(batch_T[used], minlength=count).astype(np.int32),
        time_s_N=np.arange(count, dtype=np.float64) * _STEP_S,
        decode_tokens_N=decoded.astype(np.int32),
    )


def _sum_shares(
    predictor: TrainedPredictor,
    shards: GateShards,
    rows: TokenRows,
    uses: TokenUses,
    entries: int,
    on_progress: Progress,
) -> NDArray[np.float64]:
    known = shards.manifest
    sums = torch.zeros(entries, known.num_layers, known.num_experts, dtype=torch.float64)
    first = 0
    for chunk in rows:
        tokens = 0
        for layer in range(known.num_layers - predictor.distance):
            share_TE = predictor.shares(layer, chunk.states(layer, predictor.reads))
            assert share_TE is not None
            tokens = len(share_TE)
            row, entry = uses.between(first, first + tokens)
            sums[:, layer + predictor.distance].index_add_(0, entry, share_TE[row].double())
        first += tokens
        on_progress(first, rows.tokens)
    summed: NDArray[np.float64] = sums.numpy()
    return summed


def _with_predicted(
    trace: RoutingTrace,
    share_NLE: NDArray[np.float64],
    predictor: TrainedPredictor,
    manifest: PredictorManifest,
) -> RoutingTrace:
    distance = predictor.distance
    # The first layers of a step have nothing before them: what they did in the step before.
    share_NLE[1:, :distance] = trace.loads_NLE[:-1, :distance]
    share_NLE[0, :distance] = 1.0
    assigned_N = trace.tokens_N.astype(np.float64) * manifest.top_k
    predicted = finish_load(share_NLE, assigned_N[:, None])
    described = {
        "kind": f"trained ({manifest.method})",
        "distance": distance,
        "reads": manifest.reads,
        "first_layers": "previous",
    }
    return replace(
        trace,
        predicted_NLE=predicted.astype(np.float32),
        meta=replace(trace.meta, predictor=described),
    )
