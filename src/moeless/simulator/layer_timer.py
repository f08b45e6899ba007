"""How long a layer takes, and how long its devices are busy, in one go."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.costs.linear import LinearTime
from moeless.costs.table import TableTime

TimeModel = LinearTime | TableTime


class LayerTimer:
    """Asks a time model once per layer.

    The layer time is the model's own ``layer_s``: the slowest device and the transfers of the
    fullest one. Both that and the devices' times are needed, and the model would compute the
    latter twice.

    Args:
        time_model: The model.
    """

    def __init__(self, time_model: TimeModel) -> None:
        self._time_model = time_model
        cost = time_model.cost
        self._both_ways_s = 2 * cost.transfer_s
        self._linear = cost if isinstance(time_model, LinearTime) else None

    def measure(self, share_ED: CountArray, tokens_D: CountArray) -> tuple[float, float]:
        """Time one layer.

        Args:
            share_ED: Tokens of each replica, int64 [E, D].
            tokens_D: The same, summed over the experts [D].

        Returns:
            Seconds that the layer takes, and that all its devices are busy together.
        """
        cost = self._linear
        if cost is None:
            device_s_D: NDArray[np.float64] = self._time_model.device_s(share_ED)
        else:
            device_s_D = cost.token_s * tokens_D.astype(np.float64)
            if cost.touch_s:
                device_s_D += cost.touch_s * np.add.reduce(share_ED > 0, axis=0)
            if cost.base_s:
                device_s_D += cost.base_s * (tokens_D > 0)
            if cost.speeds:
                device_s_D /= cost.speed_D(len(device_s_D))
        most = int(np.maximum.reduce(tokens_D))
        slowest_s = float(np.maximum.reduce(device_s_D))
        return slowest_s + self._both_ways_s * most, float(np.add.reduce(device_s_D))
