"""What may be added to a look-ahead from the loads that came true: history, and correction.

Both see batches in their order and use of each only what was known before it.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from moeless.learned.evaluation import Loads
from moeless.learned.history_mix import HistoryMix, fit_weight
from moeless.learned.online_correction import OnlineCorrection

Adjustment = Callable[[Loads, Loads], Loads]
"""From what was expected of batches in a row, and what came true [N, L, E], to better ones."""

_REFIT_EVERY: Final = 8
"""Batches between two choices of the weight of history."""


def mix_history(expected_NLE: Loads, actual_NLE: Loads) -> Loads:
    """Mix in the batch before, with the weight that would have suited the batches so far."""
    mixed_NLE = expected_NLE.copy()
    mix = HistoryMix({})
    for step in range(1, len(actual_NLE)):
        if step % _REFIT_EVERY == 0:
            mix = HistoryMix(
                {
                    layer: fit_weight(expected_NLE[:step, layer], actual_NLE[:step, layer])[0]
                    for layer in range(actual_NLE.shape[1])
                }
            )
        for layer in range(actual_NLE.shape[1]):
            mixed_NLE[step, layer] = mix.mix(
                layer, expected_NLE[step, layer], actual_NLE[step - 1, layer]
            )
    return mixed_NLE


def correct_online(expected_NLE: Loads, actual_NLE: Loads) -> Loads:
    """Take off a part of the error that earlier batches had on average."""
    corrected_NLE, correction = np.empty_like(expected_NLE), OnlineCorrection()
    for step, (expected_LE, actual_LE) in enumerate(zip(expected_NLE, actual_NLE, strict=True)):
        for layer, (expected_E, actual_E) in enumerate(zip(expected_LE, actual_LE, strict=True)):
            corrected_NLE[step, layer] = correction.correct(layer, expected_E)
            correction.observe(layer, expected_E, actual_E)
    return corrected_NLE


ADJUSTMENTS: Final[dict[str, Adjustment]] = {
    "history": mix_history,
    "correction": correct_online,
}
