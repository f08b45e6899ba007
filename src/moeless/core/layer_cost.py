"""What the experts of one layer cost in time: the linear model that policies optimise.

One grouped launch per device reads the weights of every expert it touches, whatever their token
count, and then computes token by token::

    device time = base + touch x (experts touched) + token x (tokens)
    layer time  = max over devices of device time + 2 x transfer x (max device tokens)

Devices of unequal speed divide their device time by their speed; links are the same for all. This
module must not know where the numbers come from (``moeless.costs``).
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import ConfigError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Coefficients of one layer, in seconds.

    Args:
        base_s: t0, the launch; paid by every device that has tokens.
        touch_s: kappa, reading one expert's weights.
        token_s: s, computing one token (one assignment).
        transfer_s: beta, moving one token's hidden state over the link, one way.
        speeds: Relative speed of each device, 1 for the one that the coefficients are of; empty
            where all are like that.

    Raises:
        ConfigError: A coefficient is negative or not finite, a token costs nothing, or a speed is
            not a positive number.
    """

    base_s: float = 0.0
    touch_s: float = 0.0
    token_s: float
    transfer_s: float = 0.0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("base_s", "touch_s", "token_s", "transfer_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"layer cost: {name} is {value}; use 0 or more seconds")
        if self.token_s == 0:
            raise ConfigError("layer cost: token_s is 0; a token costs some time")
        for speed in self.speeds:
            if not (math.isfinite(speed) and speed > 0):
                raise ConfigError(f"layer cost: a device has speed {speed}; use more than 0")
        if all(speed == 1.0 for speed in self.speeds):
            object.__setattr__(self, "speeds", ())

    def speed_D(self, num_devices: int) -> FloatArray:
        """Speed of each device [D].

        Args:
            num_devices: D.

        Raises:
            ConfigError: There are speeds of another number of devices.
        """
        if not self.speeds:
            return np.ones(num_devices)
        if len(self.speeds) != num_devices:
            raise ConfigError(
                f"layer cost: {len(self.speeds)} speeds for {num_devices} devices; give one each"
            )
        return np.array(self.speeds)

    def slowed_by(self, speed_D: FloatArray) -> Self:
        """The same with devices that have become slower or faster.

        Args:
            speed_D: Speed of each device relative to what it was [D].

        Raises:
            ConfigError: There are speeds of another number of devices, or one is not positive.
        """
        return replace(self, speeds=tuple((self.speed_D(len(speed_D)) * speed_D).tolist()))

    def price_XD(self, num_devices: int) -> FloatArray:
        """What each device takes for being used, for an expert and for a token [3, D].

        The unit is the time of a token at speed 1, its transfers included. Where all devices are
        equal the first row is left at 0: what all pay alike does not matter to who is slowest.

        Args:
            num_devices: D.

        Raises:
            ConfigError: There are speeds of another number of devices.
        """
        both_ways_s = 2 * self.transfer_s
        speed_D = self.speed_D(num_devices)
        base_s = self.base_s if self.speeds else 0.0
        rows = [base_s / speed_D, self.touch_s / speed_D, self.token_s / speed_D + both_ways_s]
        price_XD: FloatArray = np.stack(rows) / (self.token_s + both_ways_s)
        return price_XD

    def device_s(self, tokens_ED: CountArray) -> FloatArray:
        """Time of each device, in seconds [D]; 0 for a device without tokens.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        tokens_D = tokens_ED.sum(axis=0)
        touched_D = np.count_nonzero(tokens_ED, axis=0)
        busy_s_D = self.base_s + self.touch_s * touched_D + self.token_s * tokens_D
        if self.speeds:
            busy_s_D = busy_s_D / self.speed_D(len(busy_s_D))
        return np.where(tokens_D > 0, busy_s_D, 0.0)

    def layer_s(self, tokens_ED: CountArray) -> float:
        """Time of the layer in seconds: the slowest device, and the hidden states there and back.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        most = int(tokens_ED.sum(axis=0).max(initial=0))
        return float(self.device_s(tokens_ED).max(initial=0.0)) + 2 * self.transfer_s * most

    def bound_s(self, count_E: CountArray, num_devices: int) -> float:
        """A lower bound of ``layer_s`` for every lossless split.

        Args:
            count_E: Tokens of each expert, int64 [E].
            num_devices: D.
        """
        total_N = np.array([count_E.sum()])
        active_N = np.array([np.count_nonzero(count_E)])
        return float(self.bounds_s(total_N, active_N, num_devices)[0])

    def bounds_s(self, total_N: CountArray, active_N: CountArray, num_devices: int) -> FloatArray:
        """``bound_s`` of many loads at once, in seconds [N]; 0 for loads without tokens.

        Args:
            total_N: Tokens of each, its assignments.
            active_N: Experts of each that have tokens.
            num_devices: D.
        """
        if self.speeds:
            bound_N = self._uneven_bounds_s(total_N, active_N, num_devices)
        else:
            share_N = -(-total_N // num_devices)
            one_s = self.touch_s + self.token_s
            spread_N = (self.touch_s * active_N + self.token_s * total_N) / num_devices
            seats_N = -(-active_N // num_devices) * one_s
            fullest_N = self.touch_s + self.token_s * share_N
            expert_N = np.maximum(spread_N, np.maximum(seats_N, fullest_N))
            bound_N = self.base_s + expert_N + 2 * self.transfer_s * share_N
        return np.where(total_N > 0, bound_N, 0.0)

    def _uneven_bounds_s(
        self, total_N: CountArray, active_N: CountArray, num_devices: int
    ) -> FloatArray:
        """The same three arguments, each a level up to which devices are filled; no rounding."""
        base_D, touch_D, token_D = self.price_XD(num_devices)
        unit_s = self.token_s + 2 * self.transfer_s
        touch = self.touch_s / unit_s
        # How much work, by the prices at speed 1, a device does at most in a unit of time.
        rate_D = 1.0 / token_D
        if touch > 0:
            rate_D = np.maximum(rate_D, touch / touch_D)
        spread_N = fill_level(touch * active_N + total_N, 1.0 / rate_D, base_D)
        seats_N = fill_level(active_N, touch_D + token_D, base_D)
        fullest_N = fill_level(total_N, token_D, base_D + touch_D)
        return unit_s * np.maximum(spread_N, np.maximum(seats_N, fullest_N))


def fill_level(
    amount_N: NDArray[np.generic], price_D: FloatArray, offset_D: FloatArray
) -> FloatArray:
    """The least level up to which devices can be filled with an amount [N].

    Args:
        amount_N: Amounts to divide over the devices.
        price_D: By how much a unit raises each device.
        offset_D: Where each device begins as soon as it has anything.
    """
    order = np.argsort(offset_D, kind="stable")
    rate_D = np.cumsum(1.0 / price_D[order])
    begun_D = np.cumsum(offset_D[order] / price_D[order])
    # Filling the first k devices only, for every k: the lowest one counts.
    level_NK = (np.asarray(amount_N)[:, None] + begun_D) / rate_D
    least_N: FloatArray = level_NK.min(axis=1)
    return least_N
