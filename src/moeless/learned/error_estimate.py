"""How far a prediction is expected to be off, from how far it was off on held-out tokens."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeless.errors import ConfigError

ERROR_BATCHES = (16, 64, 256)
"""Batch sizes at which errors are measured."""


@dataclass(frozen=True, kw_only=True)
class ErrorEstimate:
    """Share of misplaced tokens, one minus load accuracy, by the size of the batch.

    Args:
        batches: Tokens of a batch, ascending.
        mean: Mean share at each size.
        p90: What nine of ten batches stay below, at each size.

    Raises:
        ConfigError: The three do not go together.
    """

    batches: Sequence[int]
    mean: Sequence[float]
    p90: Sequence[float]

    def __post_init__(self) -> None:
        sizes = list(self.batches)
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(f"error estimate: batches {sizes} are not ascending sizes")
        for name in ("mean", "p90"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.shape != (len(sizes),) or not np.isfinite(values).all():
                raise ConfigError(
                    f"error estimate: {name} needs a finite number for each of {sizes}"
                )

    def mean_at(self, tokens: int) -> float:
        """Expected share of misplaced tokens in a batch of so many tokens."""
        return self._at(tokens, self.mean)

    def p90_at(self, tokens: int) -> float:
        """Share of misplaced tokens that nine of ten such batches stay below."""
        return self._at(tokens, self.p90)

    def _at(self, tokens: int, values: Sequence[float]) -> float:
        # Errors fall with the logarithm of the size over the range measured; beyond it the
        # nearest one is the safe guess for larger batches, and the only one for smaller.
        # This is on the token path, so without arrays.
        sizes, place = self.batches, bisect.bisect_right(self.batches, tokens)
        if place == 0 or place == len(sizes):
            return float(values[max(0, place - 1)])
        low, high = sizes[place - 1], sizes[place]
        part = math.log(tokens / low) / math.log(high / low)
        return float(values[place - 1] + part * (values[place] - values[place - 1]))
