"""GB·s of a model's functions, in the four accountings that are always shown side by side.

billed
    Bytes of a function times the time it executes: what a serverless user pays.
resident
    Bytes times the time on a device, idle keep-alive included: what the operator holds.
reserved
    Whole device budgets times wall time: what a serverful deployment pays.
paper
    The comparison of the MoEless paper: for each layer-step, layer time times the bytes of that
    layer's warm replicas.

GB is 10^9 bytes, time is wall clock.
"""

import numpy as np
from numpy.typing import NDArray

GB = 1e9


class ResidencyMeter:
    """Integrates bytes over time, layer by layer.

    Args:
        num_layers: L.
        now_s: When the meter starts.
    """

    def __init__(self, num_layers: int, *, now_s: float) -> None:
        self._last_s = now_s
        self._bytes_L: NDArray[np.int64] = np.zeros(num_layers, dtype=np.int64)
        self._byte_s_L: NDArray[np.float64] = np.zeros(num_layers)

    def add_bytes(self, layer: int, num_bytes: int, *, now_s: float) -> None:
        """A layer holds more bytes from now on, or fewer if negative."""
        self._advance(now_s)
        self._bytes_L[layer] += num_bytes

    def gb_s_L(self, *, now_s: float) -> NDArray[np.float64]:
        """GB·s of each layer until now."""
        self._advance(now_s)
        return self._byte_s_L / GB

    def _advance(self, now_s: float) -> None:
        self._byte_s_L += self._bytes_L * (now_s - self._last_s)
        self._last_s = now_s
