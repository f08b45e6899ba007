"""A time model read off measurements: device time by tokens and experts touched."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray
from moeless.costs.fitting import KernelFit, fit_kernels
from moeless.errors import ConfigError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class TableTime:
    """Device times between measured points.

    Inside the grid times are interpolated (bi)linearly. Below its first tokens or touched count
    the first ones hold; beyond its last ones, time goes on with the mean slope of the last
    interval, the same everywhere. Measurements are noisy, so a point that is faster than one
    with fewer tokens or fewer experts counts as equally slow: more work never takes less time.

    Args:
        tokens_A: Tokens of the device, ascending, positive [A], A >= 2.
        touched_B: Experts touched, ascending, positive [B]; one value if it was not varied.
        seconds_AB: Measured seconds [A, B].
        transfer_s: Moving one token's hidden state over the link, one way.
        label: Where the table comes from, for reports.
        speeds: Relative speed of each device, 1 for the one that was measured; empty where all
            are like that.

    Raises:
        ConfigError: Axes that do not ascend, a wrong shape, a value that is not finite and
            positive, or times that do not grow with tokens.
    """

    tokens_A: FloatArray
    touched_B: FloatArray
    seconds_AB: FloatArray
    transfer_s: float = 0.0
    label: str = "table"
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, axis, least in (("tokens", self.tokens_A, 2), ("touched", self.touched_B, 1)):
            if axis.ndim != 1 or len(axis) < least:
                raise ConfigError(f"time table: {name} needs a list of {least} or more values")
            if not (np.isfinite(axis).all() and axis[0] > 0 and (np.diff(axis) > 0).all()):
                raise ConfigError(f"time table: {name} must be positive and ascending")
        expected = (len(self.tokens_A), len(self.touched_B))
        if self.seconds_AB.shape != expected:
            raise ConfigError(
                f"time table: seconds has shape {list(self.seconds_AB.shape)}; expected one row "
                f"per tokens value and one column per touched value, {list(expected)}"
            )
        good = np.isfinite(self.seconds_AB) & (self.seconds_AB > 0)
        if not good.all():
            row, column = (int(index) for index in np.argwhere(~good)[0])
            raise ConfigError(
                f"time table: seconds[{row}][{column}] is {self.seconds_AB[row, column]}; "
                f"times are positive"
            )
        if not (math.isfinite(self.transfer_s) and self.transfer_s >= 0):
            raise ConfigError(f"time table: transfer_s is {self.transfer_s}; use 0 or more")
        if self._fit.token_s <= 0:
            raise ConfigError("time table: times do not grow with tokens; measure more of them")

    @cached_property
    def cost(self) -> LayerCost:
        """The linear model closest to the table, in relative least squares."""
        cost = self._fit.layer_cost(transfer_s=self.transfer_s)
        return replace(cost, speeds=self.speeds)

    def device_s(self, tokens_ED: CountArray) -> FloatArray:
        """Time of each device in seconds [D]; 0 for a device without tokens.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        tokens_D = tokens_ED.sum(axis=0)
        touched_D = np.count_nonzero(tokens_ED, axis=0)
        busy_s_D = np.where(tokens_D > 0, self.seconds(tokens_D, touched_D), 0.0)
        return busy_s_D / self.cost.speed_D(len(busy_s_D)) if self.speeds else busy_s_D

    def layer_s(self, tokens_ED: CountArray) -> float:
        """Time of the layer in seconds, transfers included.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        most = int(tokens_ED.sum(axis=0).max(initial=0))
        return float(self.device_s(tokens_ED).max(initial=0.0)) + 2 * self.transfer_s * most

    def seconds(self, tokens_D: CountArray, touched_D: CountArray) -> FloatArray:
        """Seconds [D] of so many tokens on so many experts, at speed 1."""
        row, row_share, beyond_tokens = _locate(self.tokens_A, tokens_D)
        column, column_share, beyond_touched = _locate(self.touched_B, touched_D)
        next_row = np.minimum(row + 1, len(self.tokens_A) - 1)
        next_column = np.minimum(column + 1, len(self.touched_B) - 1)
        grid = self._rising_AB
        here = grid[row, column] * (1 - column_share) + grid[row, next_column] * column_share
        there = (
            grid[next_row, column] * (1 - column_share)
            + grid[next_row, next_column] * column_share
        )
        inside = here * (1 - row_share) + there * row_share
        token_s, touch_s = self._last_slopes
        return inside + token_s * beyond_tokens + touch_s * beyond_touched

    @cached_property
    def _fit(self) -> KernelFit:
        tokens_AB, touched_AB = np.broadcast_arrays(self.tokens_A[:, None], self.touched_B)
        return fit_kernels(tokens_AB.ravel(), touched_AB.ravel(), self.seconds_AB.ravel())

    @cached_property
    def _rising_AB(self) -> FloatArray:
        rising = np.maximum.accumulate(self.seconds_AB, axis=0)
        return np.maximum.accumulate(rising, axis=1)

    @cached_property
    def _last_slopes(self) -> tuple[float, float]:
        grid = self._rising_AB
        tokens_A, touched_B = self.tokens_A, self.touched_B
        token_s = float(np.mean(grid[-1] - grid[-2]) / (tokens_A[-1] - tokens_A[-2]))
        if len(touched_B) == 1:
            return token_s, 0.0
        touch_s = float(np.mean(grid[:, -1] - grid[:, -2]) / (touched_B[-1] - touched_B[-2]))
        return token_s, touch_s


def _locate(
    axis: FloatArray, values: CountArray
) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
    """The interval of each value, its share of the interval, and how far it lies beyond it."""
    inside = np.clip(values.astype(np.float64), axis[0], axis[-1])
    index = np.clip(np.searchsorted(axis, inside, side="right") - 1, 0, max(len(axis) - 2, 0))
    upper = np.minimum(index + 1, len(axis) - 1)
    width = np.where(upper > index, axis[upper] - axis[index], 1.0)
    share = (inside - axis[index]) / width
    return index, share, np.maximum(values - axis[-1], 0.0)
