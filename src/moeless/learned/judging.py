"""Loads of batches from shares of tokens, and how good a layer's shares are."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeless.learned.accuracy import load_accuracies
from moeless.learned.batching import UNUSED, Batching, batch_tokens
from moeless.learned.error_estimate import ERROR_BATCHES, ErrorEstimate
from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.load_predictor import finish_load
from moeless.learned.trained_predictor import LayerModel

JUDGED_BATCH = 256
"""Tokens of the batches whose mean load accuracy is held against thresholds."""

_SPREADS = (0.0, 0.5, 0.7, 0.85, 1.0)
"""Tried multiples of the logits' error. The whole error is usually too much: part of it moves
all logits of a token together."""


def sum_batches(share_TE: Tensor, batch_T: NDArray[np.int64]) -> NDArray[np.float64]:
    """Add up the shares of each batch's tokens.

    Args:
        share_TE: Shares of tokens [T, E].
        batch_T: Number of each token's batch, ``UNUSED`` for none [T].

    Returns:
        float64 [N, E].
    """
    used = batch_T != UNUSED
    count = int(batch_T.max()) + 1 if used.any() else 0
    load_NE = torch.zeros((count, share_TE.shape[1]), dtype=torch.float64)
    chosen = torch.from_numpy(np.flatnonzero(used))
    load_NE.index_add_(0, torch.from_numpy(batch_T[used]), share_TE[chosen].double())
    summed: NDArray[np.float64] = load_NE.numpy()
    return summed


class TokenPlaces(Protocol):
    """Where tokens stand, so that batches can be made of them; ``TokenRows`` says so."""

    @property
    def conversation(self) -> NDArray[np.int64]:
        """Conversation of each token [T]."""
        ...

    @property
    def position(self) -> NDArray[np.int64]:
        """Position in its conversation of each token [T]."""
        ...

    @property
    def decode(self) -> NDArray[np.int64]:
        """1 where the token was decoded [T]."""
        ...


class Judge:
    """Says how well shares of the same tokens meet the choices that were made.

    Args:
        rows: The tokens.
        sizes: Tokens of a batch, several.
        batching: How tokens are put together.
    """

    def __init__(
        self, rows: TokenPlaces, sizes: Sequence[int], batching: Batching = "recorded"
    ) -> None:
        self.sizes = tuple(sizes)
        self._batch_T = {
            size: batch_tokens(
                rows.conversation, rows.position, rows.decode, size=size, batching=batching
            )
            for size in sizes
        }

    def loads(self, share_TE: Tensor, size: int) -> NDArray[np.float64]:
        """Loads of batches of a size, as summed [N, E]."""
        return sum_batches(share_TE, self._batch_T[size])

    def accuracies(self, share_TE: Tensor, true_TE: Tensor, size: int) -> NDArray[np.float64]:
        """Load accuracy of every batch of a size [N]."""
        true_NE = self.loads(true_TE, size)
        expected_NE = finish_load(self.loads(share_TE, size), true_NE.sum(axis=-1))
        return load_accuracies(expected_NE, true_NE)

    def accuracy(self, share_TE: Tensor, true_TE: Tensor) -> float:
        """Mean load accuracy at the largest size of which there are batches; else 0."""
        for size in sorted(self.sizes, reverse=True):
            accuracy_N = self.accuracies(share_TE, true_TE, size)
            if len(accuracy_N):
                return float(accuracy_N.mean())
        return 0.0

    def score(self, share_TE: Tensor, true_TE: Tensor) -> float:
        """Mean load accuracy over the sizes: steadier than that of a few large batches."""
        means = [
            float(accuracy_N.mean())
            for size in self.sizes
            if len(accuracy_N := self.accuracies(share_TE, true_TE, size))
        ]
        return float(np.mean(means)) if means else 0.0

    def error(self, share_TE: Tensor, true_TE: Tensor) -> ErrorEstimate | None:
        """Mean and 90th percentile of misplaced shares by size; None without a batch."""
        wrong = {size: 1.0 - self.accuracies(share_TE, true_TE, size) for size in self.sizes}
        wrong = {size: wrong_N for size, wrong_N in sorted(wrong.items()) if len(wrong_N)}
        if not wrong:
            return None
        return ErrorEstimate(
            batches=tuple(wrong),
            mean=tuple(float(wrong_N.mean()) for wrong_N in wrong.values()),
            p90=tuple(float(np.quantile(wrong_N, 0.9)) for wrong_N in wrong.values()),
        )


def judge_of(rows: TokenPlaces) -> Judge:
    """The judge by which models are chosen and errors estimated."""
    return Judge(rows, ERROR_BATCHES)


def best_spread(
    model: LayerModel,
    logits_TE: Tensor,
    ids_TK: Tensor,
    judge: Judge,
    *,
    scale: float,
) -> tuple[float, float]:
    """How sure to be of predicted logits.

    Args:
        model: What predicted them; gives the rule.
        logits_TE: Predicted logits [T, E].
        ids_TK: Experts chosen [T, K].
        judge: Decides.
        scale: Typical error of the logits.

    Returns:
        The spread, and the judge's score with it.
    """
    true_TE = one_hot(ids_TK, logits_TE.shape[1])
    found = []
    for factor in _SPREADS:
        share_TE = expected_shares(logits_TE, model.rule, model.correction, spread=factor * scale)
        found.append((judge.score(share_TE, true_TE), -factor))
    score, negative = max(found)
    return -negative * scale, score


def logit_error(predicted_TE: Tensor, true_TE: Tensor) -> float:
    """Root mean square error of logits, what moves all of a token's together left out."""
    error_TE = predicted_TE - true_TE
    error_TE = error_TE - error_TE.mean(dim=1, keepdim=True)
    return float(error_TE.pow(2).mean().sqrt())
