"""A convex mix of look-ahead and the step before."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import LoadArray
from moeless.learned.accuracy import load_accuracies
from moeless.learned.load_predictor import finish_load

_WEIGHTS: Sequence[float] = tuple(np.arange(0, 21) / 20.0)


class HistoryMix:
    """Adds a part of the last load to what is expected, with a weight of its own per layer.

    Args:
        weights: Part of the last load by layer, 0 to 1; 0 where missing.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        self.weights = dict(weights)

    def mix(self, layer: int, expected_E: LoadArray, previous_E: LoadArray | None) -> LoadArray:
        """The mix, float64 [E], scaled to the sum of what is expected."""
        weight = self.weights.get(layer, 0.0)
        if weight == 0.0 or previous_E is None or float(previous_E.sum()) <= 0.0:
            return expected_E
        total = float(expected_E.sum())
        return finish_load(
            (1.0 - weight) * expected_E + weight * total / previous_E.sum() * previous_E, total
        )


def fit_weight(
    expected_NE: NDArray[np.float64], actual_NE: NDArray[np.float64]
) -> tuple[float, float]:
    """The weight of the step before that suits a layer best.

    Args:
        expected_NE: What look-ahead expected of steps in a row [N, E].
        actual_NE: What came true [N, E].

    Returns:
        The weight, and the mean load accuracy that it gains; 0 and 0 without two steps.
    """
    if len(actual_NE) < 2:
        return 0.0, 0.0
    total_N = actual_NE[1:].sum(axis=-1)
    before_NE = finish_load(actual_NE[:-1], total_N)
    expected_NE = finish_load(expected_NE[1:], total_N)
    gains = [
        float(load_accuracies((1.0 - w) * expected_NE + w * before_NE, actual_NE[1:]).mean())
        for w in _WEIGHTS
    ]
    best = int(np.argmax(gains))
    return float(_WEIGHTS[best]), gains[best] - gains[0]
