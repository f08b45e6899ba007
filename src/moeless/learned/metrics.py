"""Figures of merit of a load predictor over many batches.

Similarity of load vectors alone flatters any predictor: the load of the step before already has
a cosine of 0.97 with the next. These figures ask what balancing needs: which expert will be hot,
and by how much. Must not know predictors: it sees loads and expert ids.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeless.learned.accuracy import load_accuracies


@dataclass(frozen=True, kw_only=True)
class LoadScores:
    """How well predicted loads met true ones.

    Args:
        load_accuracy: Mean share of tokens predicted for the right expert, 0 to 1.
        error_p90: The share of misplaced tokens that nine of ten batches stay below.
        hot_hit_rate: How often the expert predicted to be the hottest was one of the hottest.
        max_load_error: Mean of ``|predicted maximum - true maximum| / true maximum``.
        pearson_r: Correlation of predicted and true loads over all (batch, layer, expert); 0
            where either does not vary.
        batches: How many loads were compared, those without tokens left out.
    """

    load_accuracy: float
    error_p90: float
    hot_hit_rate: float
    max_load_error: float
    pearson_r: float
    batches: int


def score_loads(predicted_NE: ArrayLike, actual_NE: ArrayLike) -> LoadScores | None:
    """Compare predicted with true loads.

    Args:
        predicted_NE: Predicted tokens per expert [..., E].
        actual_NE: True tokens per expert [..., E].

    Returns:
        The figures; None where no batch has a token.

    Raises:
        ValueError: The shapes differ.
    """
    actual = np.asarray(actual_NE, dtype=np.float64)
    predicted = np.asarray(predicted_NE, dtype=np.float64)
    if predicted.shape != actual.shape:
        raise ValueError(f"{predicted.shape} predicted loads for {actual.shape} true ones")
    busy_N = actual.sum(axis=-1) > 0.0
    if not busy_N.any():
        return None
    actual, predicted = actual[busy_N], predicted[busy_N]
    accuracy_N = load_accuracies(predicted, actual)
    hottest_N, expected_N = actual.max(axis=-1), predicted.max(axis=-1)
    hit_N = (
        np.take_along_axis(actual, predicted.argmax(axis=-1)[..., None], axis=-1)[..., 0]
        == hottest_N
    )
    return LoadScores(
        load_accuracy=float(accuracy_N.mean()),
        error_p90=float(np.quantile(1.0 - accuracy_N, 0.9)),
        hot_hit_rate=float(hit_N.mean()),
        max_load_error=float((np.abs(expected_N - hottest_N) / hottest_N).mean()),
        pearson_r=_pearson(predicted.ravel(), actual.ravel()),
        batches=int(busy_N.sum()),
    )


def token_recall(predicted_TK: ArrayLike, actual_TK: ArrayLike) -> float:
    """Share of the experts that tokens really chose which were predicted for that token.

    Args:
        predicted_TK: Predicted expert ids of each token [T, K], none twice.
        actual_TK: True expert ids [T, K].

    Returns:
        Between 0 and 1; 1 where there is no token.

    Raises:
        ValueError: The shapes differ.
    """
    hits, wanted = recalled(predicted_TK, actual_TK), np.asarray(actual_TK).size
    return hits / wanted if wanted else 1.0


def recalled(predicted_TK: ArrayLike, actual_TK: ArrayLike) -> int:
    """How many of the experts that tokens really chose were predicted, all tokens together.

    Raises:
        ValueError: The shapes differ.
    """
    predicted, actual = np.asarray(predicted_TK), np.asarray(actual_TK)
    if predicted.shape != actual.shape:
        raise ValueError(f"{predicted.shape} predicted experts for {actual.shape} true ones")
    return int((predicted[:, :, None] == actual[:, None, :]).sum())


def _pearson(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    first, second = predicted - predicted.mean(), actual - actual.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale > 0.0 else 0.0
