"""How fast devices have been of late, from the time that their work took.

A device that is throttled, hot or shared with somebody becomes slow while it serves. What counts
is its time over the time that the cost model expects, held against the other devices: a cost model
that is wrong for all alike makes no difference. Pure.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray

_MEMORY = 512
"""Work items after which what was measured before weighs a third (e-fold)."""
_LOOK_EVERY = 32
_WARM_UP = 64
"""Items of a new device that do not count: much is done for the first time."""
_LEAST_ITEMS = 192
_TYPICAL_WEIGHT = 0.05
_SLOW = 1.5
_SLOW_NO_MORE = 1.2
"""Times as long as the others: from where on a device is slow, and until when it stays so."""
_ANOTHER_SPEED = 1.25
"""Factor by which a slow device's speed must have changed before another one is put in force."""
_LEAST_SPEED = 0.125
_OUTLIER = 64.0
"""An item counts for at most so many times what is usual: a single long pause says little."""
_FORGOTTEN_AFTER = 2048
"""Items of others without one of its own after which a device is taken for as fast as they are."""


class DeviceSpeeds:
    """Relative speeds, 1 for all until one is clearly slower than the others.

    Args:
        cost: What experts cost in time.
        num_devices: D.
    """

    def __init__(self, cost: LayerCost, num_devices: int) -> None:
        self._cost = cost
        self._known_D = cost.speed_D(num_devices)
        self._busy_D = np.zeros(num_devices)
        self._modelled_D = np.zeros(num_devices)
        self._typical_D = np.zeros(num_devices)  # logarithm of an item's time over the model's
        self._items_D: CountArray = np.zeros(num_devices, dtype=np.int64)
        self._since_D: CountArray = np.zeros(num_devices, dtype=np.int64)
        self._notes = 0
        self.speed_D = np.ones(num_devices)
        """In force, beyond those that the cost model knows of."""

    def note(self, tokens_ED: CountArray, busy_ns_D: NDArray[np.int64]) -> bool:
        """Devices have done some work.

        Args:
            tokens_ED: What each computed, tokens of one layer.
            busy_ns_D: How long each took; 0 for one that gave no answer.

        Returns:
            Whether other speeds are in force now.
        """
        modelled_D = self._cost.device_s(tokens_ED)
        busy_D = np.asarray(busy_ns_D) / 1e9
        worked_D = (modelled_D > 0) & (busy_D > 0)
        log_ratio_D = np.log(busy_D[worked_D] / modelled_D[worked_D])
        weight_D = np.where(self._items_D[worked_D] > 0, _TYPICAL_WEIGHT, 1.0)
        self._typical_D[worked_D] += weight_D * (log_ratio_D - self._typical_D[worked_D])
        most_D = modelled_D * np.exp(self._typical_D) * _OUTLIER
        self._items_D += worked_D
        counted_D = worked_D & (self._items_D > _WARM_UP)
        for sum_D, new_D in (
            (self._busy_D, np.minimum(busy_D, most_D)),
            (self._modelled_D, modelled_D),
        ):
            sum_D[counted_D] += new_D[counted_D] - sum_D[counted_D] / _MEMORY
        self._since_D += 1
        self._since_D[worked_D] = 0
        self._notes += 1
        return self._notes % _LOOK_EVERY == 0 and self._judge()

    def _judge(self) -> bool:
        forgotten_D = (self._since_D > _FORGOTTEN_AFTER) & (self._items_D > 0)
        self._items_D[forgotten_D] = 0
        self._busy_D[forgotten_D] = self._modelled_D[forgotten_D] = 0.0
        known_D = self._items_D >= _LEAST_ITEMS
        speed_D = np.ones(len(self.speed_D))
        if np.count_nonzero(known_D) >= 2:
            slowness_D = self._busy_D[known_D] / self._modelled_D[known_D]
            usual = np.sort(slowness_D)[(len(slowness_D) - 1) // 2]
            speed_D[known_D] = np.clip(usual / slowness_D, _LEAST_SPEED, 1.0)
        kept_D = self.speed_D
        limit_D = np.where(kept_D < 1.0, 1.0 / _SLOW_NO_MORE, 1.0 / _SLOW)
        wanted_D = np.where(speed_D < limit_D, speed_D, 1.0)
        ratio_D = wanted_D / kept_D
        close_D = (ratio_D < _ANOTHER_SPEED) & (ratio_D > 1.0 / _ANOTHER_SPEED) & (wanted_D < 1.0)
        wanted_D[close_D] = kept_D[close_D]
        changed = not np.array_equal(wanted_D, kept_D)
        self.speed_D = wanted_D
        return changed

    def cost_now(self) -> LayerCost:
        """The cost model with the speeds in force."""
        return replace(self._cost, speeds=tuple((self._known_D * self.speed_D).tolist()))
