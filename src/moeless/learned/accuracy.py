"""How good a load prediction was: one batch, or many at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
    return float(load_accuracies(predicted_E, actual_E))


def load_accuracies(predicted_NE: ArrayLike, actual_NE: ArrayLike) -> NDArray[np.float64]:
    """Load accuracy of each of many batches.

    Args:
        predicted_NE: Predicted tokens per expert [..., E].
        actual_NE: True tokens per expert [..., E].

    Returns:
        float64 [...], as ``load_accuracy`` gives for each.

    Raises:
        ValueError: The shapes differ.
    """
    predicted = np.asarray(predicted_NE, dtype=np.float64)
    actual = np.asarray(actual_NE, dtype=np.float64)
    if predicted.shape != actual.shape:
        raise ValueError(f"{predicted.shape} predicted loads for {actual.shape} true ones")
    wrong_N, total_N = np.abs(predicted - actual).sum(axis=-1), actual.sum(axis=-1)
    share_N = wrong_N / (2.0 * np.where(total_N > 0.0, total_N, 1.0))
    empty_N = np.where(wrong_N == 0.0, 1.0, 0.0)
    accuracy_N: NDArray[np.float64] = np.where(
        total_N > 0.0, np.maximum(0.0, 1.0 - share_N), empty_N
    )
    return accuracy_N
