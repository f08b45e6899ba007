"""How sure a ratio of mean times is: bootstrap over alternations."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_RESAMPLES = 10_000


class Ratio(NamedTuple):
    """A ratio of means, and where 95% of the resampled ones lie.

    Args:
        value: Of all alternations.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def as_change(self) -> str:
        """As a change in percent: ``-12.3% [-14.0, -10.2]``."""
        value, low, high = (100 * (each - 1) for each in self)
        return f"{value:+.1f}% [{low:+.1f}, {high:+.1f}]"


def bootstrap_ratio(ours_A: FloatArray, other_A: FloatArray, *, seed: int) -> Ratio:
    """The ratio of two means over alternations, which are drawn again together.

    Args:
        ours_A: Mean time in each alternation.
        other_A: That of the other in the same alternation.
        seed: Of the drawing.
    """
    drawn = np.random.default_rng(seed).integers(0, len(ours_A), (_RESAMPLES, len(ours_A)))
    ratios = ours_A[drawn].mean(axis=1) / other_A[drawn].mean(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(float(ours_A.mean() / other_A.mean()), float(low), float(high))
