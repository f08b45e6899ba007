"""What the experts of one layer cost in time: the linear model that policies optimise.

One grouped launch per device reads the weights of every expert it touches, whatever their token
count, and then computes token by token::

    device time = base + touch x (experts touched) + token x (tokens)
    layer time  = max over devices of device time + 2 x transfer x (max device tokens)

This module must not know where the numbers come from (``moeless.costs``).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Coefficients of one layer on equal devices, in seconds.

    Args:
        base_s: t0, the launch; paid by every device that has tokens.
        touch_s: kappa, reading one expert's weights.
        token_s: s, computing one token (one assignment).
        transfer_s: beta, moving one token's hidden state over the link, one way.

    Raises:
        ConfigError: A coefficient is negative or not finite, or a token costs nothing.
    """

    base_s: float = 0.0
    touch_s: float = 0.0
    token_s: float
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_s", "touch_s", "token_s", "transfer_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"layer cost: {name} is {value}; use 0 or more seconds")
        if self.token_s == 0:
            raise ConfigError("layer cost: token_s is 0; a token costs some time")

    def device_s(self, tokens_ED: CountArray) -> NDArray[np.float64]:
        """Time of each device, in seconds [D]; 0 for a device without tokens.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        tokens_D = tokens_ED.sum(axis=0)
        touched_D = np.count_nonzero(tokens_ED, axis=0)
        busy_s_D = self.base_s + self.touch_s * touched_D + self.token_s * tokens_D
        return np.where(tokens_D > 0, busy_s_D, 0.0)

    def layer_s(self, tokens_ED: CountArray) -> float:
        """Time of the layer in seconds: the slowest device, and the hidden states there and back.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        most = int(tokens_ED.sum(axis=0).max(initial=0))
        return float(self.device_s(tokens_ED).max(initial=0.0)) + 2 * self.transfer_s * most

    def bound_s(self, count_E: CountArray, num_devices: int) -> float:
        """A lower bound of ``layer_s`` for every lossless split on equal devices.

        Args:
            count_E: Tokens of each expert, int64 [E].
            num_devices: D.
        """
        total = int(count_E.sum())
        if total == 0:
            return 0.0
        active = int(np.count_nonzero(count_E))
        share = -(-total // num_devices)
        one_s = self.touch_s + self.token_s
        spread_s = (self.touch_s * active + self.token_s * total) / num_devices
        seats_s = -(-active // num_devices) * one_s
        fullest_s = self.touch_s + self.token_s * share
        return self.base_s + max(spread_s, seats_s, fullest_s) + 2 * self.transfer_s * share
