"""How good a load prediction was."""

import numpy as np
from numpy.typing import ArrayLike


def load_accuracy(predicted_E: ArrayLike, actual_E: ArrayLike) -> float:
    """Share of tokens that were predicted for the right expert.

    ``1 - sum(|predicted - actual|) / (2 sum(actual))``: with equal totals, half the summed
    differences are the tokens that went elsewhere.

    Args:
        predicted_E: Predicted tokens per expert [E].
        actual_E: True tokens per expert [E].

    Returns:
        Between 0 and 1. Without any true token it is 1 if none was predicted, else 0.

    Raises:
        ValueError: The shapes differ.
    """
    predicted = np.asarray(predicted_E, dtype=np.float64)
    actual = np.asarray(actual_E, dtype=np.float64)
    if predicted.shape != actual.shape:
        raise ValueError(f"{predicted.shape} predicted loads for {actual.shape} true ones")
    wrong, total = float(np.abs(predicted - actual).sum()), float(actual.sum())
    if total <= 0.0:
        return 1.0 if wrong == 0.0 else 0.0
    return max(0.0, 1.0 - wrong / (2.0 * total))
