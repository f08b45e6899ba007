"""Expects what was observed over a window of time."""

import math
from collections import deque

import numpy as np

from moeless.core.plan import LoadArray, checked_load
from moeless.core.ports import Clock
from moeless.errors import ConfigError, PlanError

_BUCKETS = 60
"""Parts of the window; memory is this many arrays per layer, whatever the number of steps."""


class WindowPredictor:
    """Sums each layer's loads over the last seconds.

    The window moves in sixtieths: it covers the part that has begun and the 59 before it, so
    between 59/60 of ``window_s`` and all of it.

    Args:
        clock: Time of the observations.
        window_s: Length of the window; by default the ten minutes after which DeepSeek re-plans.

    Raises:
        ConfigError: ``window_s`` is not a positive, finite number.
    """

    def __init__(self, clock: Clock, window_s: float = 600.0) -> None:
        if not (math.isfinite(window_s) and window_s > 0):
            raise ConfigError(
                f"predictor window: window_s {window_s} is not a positive number of seconds; use "
                f"for example 600"
            )
        self._clock = clock
        self._bucket_s = window_s / _BUCKETS
        self._windows: dict[int, _Window] = {}

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Add the load that came true, tokens [E].

        Raises:
            PlanError: A value is not a token count, or the number of experts changed.
        """
        del step
        load = checked_load(load_E, layer=layer)
        window = self._windows.get(layer)
        if window is None:
            window = self._windows[layer] = _Window(load.size)
        elif window.num_experts != load.size:
            raise PlanError(
                f"layer {layer}: loads of {load.size} experts after loads of "
                f"{window.num_experts}; use one predictor per model"
            )
        window.add(load, bucket=self._bucket())

    def predict(self, *, step: int, layer: int) -> LoadArray | None:
        """The summed load [E], read-only; None where the window holds no observation."""
        del step
        window = self._windows.get(layer)
        return None if window is None else window.total(bucket=self._bucket())

    def _bucket(self) -> int:
        return math.floor(self._clock.now_s() / self._bucket_s)


class _Window:
    """The buckets of one layer, oldest first."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._buckets: deque[tuple[int, LoadArray]] = deque()
        self._total: LoadArray | None = None

    def add(self, load: LoadArray, *, bucket: int) -> None:
        self._total = None
        self._forget(bucket)
        if self._buckets and self._buckets[-1][0] >= bucket:
            newest = self._buckets[-1][1]
            newest += load
        else:
            self._buckets.append((bucket, load.copy()))

    def total(self, *, bucket: int) -> LoadArray | None:
        self._forget(bucket)
        if not self._buckets:
            return None
        if self._total is None:
            # Summed anew, never subtracted from: rounding must not leave a load below zero.
            total: LoadArray = np.sum([load for _, load in self._buckets], axis=0)
            total.flags.writeable = False
            self._total = total
        return self._total

    def _forget(self, bucket: int) -> None:
        while self._buckets and self._buckets[0][0] <= bucket - _BUCKETS:
            self._buckets.popleft()
            self._total = None
