"""How fast devices have been of late, from the time that their work took.

A device that is throttled, hot or shared with somebody becomes slow while it serves. What counts
is its time over the time that the cost model expects, held against the other devices: a cost model
that is wrong for all alike makes no difference. Pure.
"""

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
        self._busy_D = np.zeros(num_devices)
        self._modelled_D = np.zeros(num_devices)
        self._typical_D = np.zeros(num_devices)  # logarithm of an item's time over the model's
        self._items_D: CountArray = np.zeros(num_devices, dtype=np.int64)
        self._since_D: CountArray = np.zeros(num_devices, dtype=np.int64)
        self._notes = 0
        self.speed_D = np.ones(num_devices)
        """In force, beyond those that the cost model knows of."""
        self.measured_D = np.zeros(num_devices)
        """As measured, relative to the usual one and at most 1; 0 where too little is known."""

    def note(self, tokens_ED: CountArray, busy_ns_D: NDArray[np.int64]) -> bool:
        """Devices have done some work; now and then that is looked at.

        Args:
            tokens_ED: What each computed, tokens of one layer.
            busy_ns_D: How long each took; 0 for one that gave no answer.

        Returns:
            Whether it was looked at now, so that other speeds may be in force.
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
        if self._notes % _LOOK_EVERY:
            return False
        self._judge()
        return True

    def _judge(self) -> None:
        forgotten_D = (self._since_D > _FORGOTTEN_AFTER) & (self._items_D > 0)
        self._items_D[forgotten_D] = 0
        self._busy_D[forgotten_D] = self._modelled_D[forgotten_D] = 0.0
        known_D = self._items_D >= _LEAST_ITEMS
        speed_D = np.ones(len(self.speed_D))
        measured_D = np.zeros(len(self.speed_D))
        if np.count_nonzero(known_D) >= 2:
            slowness_D = self._busy_D[known_D] / self._modelled_D[known_D]
            usual = np.sort(slowness_D)[(len(slowness_D) - 1) // 2]
            speed_D[known_D] = np.clip(usual / slowness_D, _LEAST_SPEED, 1.0)
            measured_D[known_D] = speed_D[known_D]
        self.measured_D = measured_D
        kept_D = self.speed_D
        limit_D = np.where(kept_D < 1.0, 1.0 / _SLOW_NO_MORE, 1.0 / _SLOW)
        wanted_D = np.where(speed_D < limit_D, speed_D, 1.0)
        ratio_D = wanted_D / kept_D
        close_D = (ratio_D < _ANOTHER_SPEED) & (ratio_D > 1.0 / _ANOTHER_SPEED) & (wanted_D < 1.0)
        wanted_D[close_D] = kept_D[close_D]
        self.speed_D = wanted_D

    def cost_now(self) -> LayerCost:
        """The cost model with the speeds in force."""
        return self._cost.slowed_by(self.speed_D)
