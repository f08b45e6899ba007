"""Keeps each idle instance for as long as its function's own pauses last.

After the hybrid histogram policy of "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020):
a function that comes back within seconds is let go soon after, one with pauses of minutes is kept
over them, and one whose pauses are mostly longer than any keep-alive is not kept for their sake.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.core.model import FunctionId
from moeless.errors import ConfigError
from moeless.policies.keep_alive.fixed import check_seconds

_SHORTEST_S = 1.0
_BINS_PER_OCTAVE = 4


class HistogramKeepAlive:
    """The keep-alive that would have covered most of a function's pauses.

    Pauses of less than a second say nothing: they are the time between two steps.

    Args:
        seconds: For functions with too few pauses to tell, or whose pauses are mostly longer than
            ``longest_s``.
        longest_s: No instance is kept for longer on account of its pauses.
        coverage: Share of the pauses that the keep-alive is to cover.
        least_pauses: Pauses from which a function's own histogram counts.
        margin: Added to what covers them, as a share of it.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        seconds: float,
        *,
        longest_s: float = 3600.0,
        coverage: float = 0.95,
        least_pauses: int = 5,
        margin: float = 0.1,
    ) -> None:
        self._default_s = check_seconds(seconds)
        if not (longest_s > _SHORTEST_S and 0.0 < coverage <= 1.0 and margin >= 0.0):
            raise ConfigError(
                f"histogram keep-alive: longest_s {longest_s}, coverage {coverage} or margin "
                f"{margin} is out of range; use more than 1 s, a share up to 1, and 0 or more"
            )
        if least_pauses < 1:
            raise ConfigError(
                f"histogram keep-alive: least_pauses is {least_pauses}; use 1 or more"
            )
        self._longest_s, self._coverage = longest_s, coverage
        self._least_pauses, self._margin = least_pauses, margin
        octaves = float(np.log2(longest_s / _SHORTEST_S))
        self._num_bins = int(np.ceil(octaves * _BINS_PER_OCTAVE)) + 1  # the last: longer than that
        self._counts: dict[FunctionId, NDArray[np.int64]] = {}
        self._used_s: dict[FunctionId, float] = {}
        self._keep_s: dict[FunctionId, float] = {}

    def used(self, function: FunctionId, *, at_s: float) -> None:
        """An instance of the function, on any device, was used."""
        before_s = self._used_s.get(function)
        if before_s is not None and at_s <= before_s:
            return
        self._used_s[function] = at_s
        if before_s is None or at_s - before_s < _SHORTEST_S:
            return
        if function not in self._counts:
            self._counts[function] = np.zeros(self._num_bins, dtype=np.int64)
        octaves = np.log2((at_s - before_s) / _SHORTEST_S)
        self._counts[function][min(int(octaves * _BINS_PER_OCTAVE), self._num_bins - 1)] += 1
        self._keep_s[function] = self._covering_s(self._counts[function])

    def keep_s(self, function: FunctionId, *, idle_s: float) -> float:
        """Seconds an instance may go unused before it is retired."""
        del idle_s
        return self._keep_s.get(function, self._default_s)

    def _covering_s(self, count_B: NDArray[np.int64]) -> float:
        pauses = int(count_B.sum())
        if pauses < self._least_pauses or 2 * int(count_B[-1]) > pauses:
            return self._default_s
        covered_B = np.cumsum(count_B) >= self._coverage * pauses
        edge_s = _SHORTEST_S * 2.0 ** ((int(np.argmax(covered_B)) + 1) / _BINS_PER_OCTAVE)
        return float(min(edge_s * (1.0 + self._margin), self._longest_s))
