"""A time model whose coefficients are known: the linear model itself."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray


@dataclass(frozen=True, kw_only=True)
class LinearTime:
    """Times of the linear model.

    Args:
        cost: The coefficients.
        label: Where they come from, for reports.
    """

    cost: LayerCost
    label: str

    def device_s(self, tokens_ED: CountArray) -> NDArray[np.float64]:
        """Time of each device in seconds [D]; 0 for a device without tokens.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        return self.cost.device_s(tokens_ED)

    def layer_s(self, tokens_ED: CountArray) -> float:
        """Time of the layer in seconds, transfers included.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        return self.cost.layer_s(tokens_ED)
