"""Corrects predictions by what earlier ones got wrong."""

import numpy as np

from moeless.core.plan import LoadArray
from moeless.errors import ConfigError
from moeless.learned.load_predictor import finish_load


class OnlineCorrection:
    """Remembers by how much each expert was mispredicted, as a share of all tokens.

    The error of predictions is smoothed over steps; a part of it is added to the next. The part
    is below one because a step's error is mostly chance.

    Args:
        rate: Weight of the newest error, in (0, 1].
        strength: Part of the smoothed error that is corrected, in (0, 1].

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, rate: float = 0.1, strength: float = 0.5) -> None:
        for name, value in (("rate", rate), ("strength", strength)):
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"online correction: {name} {value} is not in (0, 1]")
        self._rate, self._strength = rate, strength
        self._error: dict[int, LoadArray] = {}

    def correct(self, layer: int, expected_E: LoadArray) -> LoadArray:
        """A layer's expected load, corrected, float64 [E]; the sum is kept."""
        error_E = self._error.get(layer)
        total = float(expected_E.sum())
        if error_E is None or total <= 0.0:
            return expected_E
        return finish_load(expected_E + self._strength * total * error_E, total)

    def observe(self, layer: int, expected_E: LoadArray, actual_E: LoadArray) -> None:
        """Learn what came true.

        Args:
            layer: MoE layer.
            expected_E: What the predictor had said, uncorrected [E].
            actual_E: The true load [E]; no tokens teach nothing.
        """
        expected, actual = float(expected_E.sum()), float(actual_E.sum())
        if expected <= 0.0 or actual <= 0.0:
            return
        newest_E = actual_E / actual - expected_E / expected
        error_E = self._error.get(layer, np.zeros_like(newest_E))
        self._error[layer] = error_E + self._rate * (newest_E - error_E)
