"""How far the gates of a model see as they are, and how alike what enters them is."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeless.errors import ConfigError, TraceError
from moeless.learned.accuracy import load_accuracies
from moeless.learned.batching import UNUSED, batch_tokens
from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.gate_predictor import Gate
from moeless.learned.judging import JUDGED_BATCH
from moeless.learned.token_rows import TokenRows


@dataclass(frozen=True, kw_only=True)
class GateProfile:
    """Copied gates, asked early: accuracy and similarity by distance and predicted layer.

    Entries of layers that have none so many layers before them are NaN.

    Args:
        distances: n of them.
        batch: Tokens of a batch.
        batches: How many batches.
        accuracy_nL: Mean load accuracy, float64 [n, L].
        recall_nL: Share of the chosen experts that were predicted for their token [n, L].
        cosine_nL: Mean cosine of the gate inputs d layers apart [n, L].
    """

    distances: tuple[int, ...]
    batch: int
    batches: int
    accuracy_nL: NDArray[np.float64]
    recall_nL: NDArray[np.float64]
    cosine_nL: NDArray[np.float64]


def profile_gates(
    gates: Sequence[Gate],
    rows: TokenRows,
    distances: Sequence[int],
    *,
    batch: int = JUDGED_BATCH,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> GateProfile:
    """Ask every gate early, on recorded tokens.

    Args:
        gates: The model's own.
        rows: The tokens.
        distances: Distances to ask at.
        batch: Tokens of a batch; batches are consecutive tokens.
        on_progress: Told how many tokens are done, and of how many.

    Raises:
        ConfigError: The model has too few layers for a distance.
        TraceError: There is not one batch of tokens.

    Source: MoEless paper, figures 6 and 7.
    """
    layers, experts = len(gates), gates[0].weight.shape[0]
    if not distances or min(distances) < 1 or max(distances) >= layers:
        raise ConfigError(
            f"distances {list(distances)}: use 1 to {layers - 1}, as the model has {layers} MoE "
            "layers"
        )
    if rows.tokens < batch:
        raise TraceError(
            f"there are {rows.tokens} tokens to profile on; record at least {batch}, better "
            f"{20 * batch}"
        )
    batch_T = torch.from_numpy(
        batch_tokens(rows.conversation, rows.position, rows.decode, size=batch)
    )
    count = int(batch_T.max()) + 1
    sums = {
        "expected": torch.zeros(len(distances), layers, count, experts, dtype=torch.float64),
        "true": torch.zeros(layers, count, experts, dtype=torch.float64),
        "recall": torch.zeros(len(distances), layers, dtype=torch.float64),
        "cosine": torch.zeros(len(distances), layers, dtype=torch.float64),
    }
    first = 0
    for chunk in rows:
        before: deque[Tensor] = deque(maxlen=max(distances))
        for ahead, gate in enumerate(gates):
            x_TH = chunk.states(ahead)
            true_TE = one_hot(chunk.topk_ids(ahead), experts)
            number_T = batch_T[first : first + len(x_TH)]
            _add(sums["true"][ahead], number_T, true_TE)
            for n, distance in enumerate(distances):
                if distance > len(before):
                    continue
                early_TH = before[-distance]
                share_TE = expected_shares(gate.logits(early_TH), gate.rule, gate.correction)
                _add(sums["expected"][n, ahead], number_T, share_TE)
                sums["recall"][n, ahead] += (share_TE * true_TE).sum() / gate.rule.top_k
                sums["cosine"][n, ahead] += torch.cosine_similarity(early_TH, x_TH).sum()
            before.append(x_TH)
        first += len(number_T)
        on_progress(first, rows.tokens)
    return _summarize(distances, batch, sums, rows.tokens)


def _add(load_NE: Tensor, number_T: Tensor, share_TE: Tensor) -> None:
    used = number_T != UNUSED
    load_NE.index_add_(0, number_T[used], share_TE[used].double())


def _summarize(
    distances: Sequence[int], batch: int, sums: dict[str, Tensor], tokens: int
) -> GateProfile:
    expected, true = sums["expected"].numpy(), sums["true"].numpy()
    known = np.arange(true.shape[0])[None, :] >= np.array(distances)[:, None]
    accuracy = load_accuracies(expected, np.broadcast_to(true, expected.shape)).mean(axis=-1)
    return GateProfile(
        distances=tuple(distances),
        batch=batch,
        batches=true.shape[1],
        accuracy_nL=np.where(known, accuracy, np.nan),
        recall_nL=np.where(known, sums["recall"].numpy() / tokens, np.nan),
        cosine_nL=np.where(known, sums["cosine"].numpy() / tokens, np.nan),
    )
