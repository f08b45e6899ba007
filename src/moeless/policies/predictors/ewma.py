"""Expects an exponentially weighted moving average of past loads."""

from moeless.core.plan import LoadArray, checked_load
from moeless.errors import ConfigError, PlanError


class EwmaPredictor:
    """Smooths each layer's loads: ``mean = alpha * new + (1 - alpha) * mean``.

    The first observation of a layer is its first mean, so that there is no bias towards zero.

    Args:
        alpha: Weight of the newest load, in (0, 1]; 1 is the same as ``previous``.

    Raises:
        ConfigError: ``alpha`` is out of range.
    """

    def __init__(self, alpha: float = 0.3) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ConfigError(
                f"predictor ewma: alpha {alpha} is not in (0, 1]; use for example 0.3"
            )
        self._alpha = alpha
        self._mean: dict[int, LoadArray] = {}

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Fold in the load that came true, tokens [E].

        Raises:
            PlanError: A value is not a token count, or the number of experts changed.
        """
        del step
        load = checked_load(load_E, layer=layer)
        mean = self._mean.get(layer)
        if mean is None:
            mean = load.copy()
        elif mean.shape != load.shape:
            raise PlanError(
                f"layer {layer}: loads of {load.size} experts after loads of {mean.size}; "
                f"use one predictor per model"
            )
        else:
            mean = mean + self._alpha * (load - mean)
        mean.flags.writeable = False
        self._mean[layer] = mean

    def predict(self, *, step: int, layer: int) -> LoadArray | None:
        """The smoothed load [E], read-only; None before the first observation."""
        del step
        return self._mean.get(layer)
