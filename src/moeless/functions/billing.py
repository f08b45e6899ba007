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

GB = 1e9


class ResidencyMeter:
    """Integrates bytes over time.

    Args:
        now_s: When the meter starts.
    """

    def __init__(self, *, now_s: float) -> None:
        self._last_s = now_s
        self._bytes = 0
        self._byte_s = 0.0

    def set_bytes(self, num_bytes: int, *, now_s: float) -> None:
        """The bytes held from now on."""
        self._byte_s += self._bytes * (now_s - self._last_s)
        self._last_s = now_s
        self._bytes = num_bytes

    def gb_s(self, *, now_s: float) -> float:
        """GB·s until now."""
        return (self._byte_s + self._bytes * (now_s - self._last_s)) / GB
