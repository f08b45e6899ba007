"""What the token path counts about itself; read by snapshots from other threads."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.model import ModelSpec
from moeless.core.plan import CountArray
from moeless.telemetry.counters import LayerStats
from moeless.telemetry.percentiles import SampleWindow

_JUDGED_STEPS = 256
"""Accuracy is a mean over about so many steps: a predictor that was replaced is forgotten."""


class TokenPathStats:
    """Counters of one engine.

    Args:
        spec: The model.
        num_devices: D.
        function_bytes: Bytes of one instance.
    """

    def __init__(self, spec: ModelSpec, *, num_devices: int, function_bytes: int) -> None:
        self._function_bytes = function_bytes
        self.layers = LayerStats(
            num_layers=spec.num_layers, num_experts=spec.num_experts, num_devices=num_devices
        )
        self.split_s = SampleWindow()
        self.layer_s = SampleWindow()
        self.forecast_s = SampleWindow()
        self.load_wait_s = SampleWindow()
        self.layer_steps = 0
        self.early_plans = 0
        self.planned_replicas = 0
        self.warm_replicas = 0
        self.paper_byte_s_L: NDArray[np.float64] = np.zeros(spec.num_layers)
        self._accuracy_L = np.full(spec.num_layers, np.nan)
        self._judged_L = [0] * spec.num_layers

    def record_plan(self, *, early: bool, planned: int, warm: int) -> None:
        """What a layer found when its gate had spoken.

        Args:
            early: The plan for this step was in force.
            planned: Replicas planned.
            warm: Those of them that were warm.
        """
        self.layer_steps += 1
        self.early_plans += early
        self.planned_replicas += planned
        self.warm_replicas += warm

    def record_split(
        self,
        layer: int,
        *,
        count_E: CountArray,
        device_tokens_D: CountArray,
        segments: int,
        devices_up: int | None = None,
    ) -> None:
        """A layer's tokens [E] went to devices [D], to ``segments`` replicas in all."""
        self.layers.record_split(
            layer, count_E=count_E, device_tokens_D=device_tokens_D, in_use=devices_up
        )
        self.layers.record_warm_starts(layer, segments)

    def record_layer(self, layer: int, *, seconds: float, warm_replicas: int) -> None:
        """A layer's experts have run."""
        self.layer_s.add(seconds)
        self.paper_byte_s_L[layer] += seconds * warm_replicas * self._function_bytes

    def record_forecast(self, seconds: float) -> None:
        """A look-ahead prediction was made."""
        self.forecast_s.add(seconds)

    def record_load_wait(self, seconds: float) -> None:
        """Tokens waited for a load."""
        self.load_wait_s.add(seconds)

    def record_accuracy(
        self, layer: int, expected_E: NDArray[np.float64], count_E: CountArray
    ) -> None:
        """A prediction met the load that came true; load accuracy of docs/metrics.md."""
        total = float(count_E.sum())
        scale = total / max(float(expected_E.sum()), 1e-9)
        error = float(np.abs(expected_E * scale - count_E).sum())
        accuracy = 1.0 - 0.5 * error / total
        self._judged_L[layer] += 1
        if self._judged_L[layer] == 1:
            self._accuracy_L[layer] = accuracy
            return
        known = float(self._accuracy_L[layer])
        weight = 1.0 / min(self._judged_L[layer], _JUDGED_STEPS)
        self._accuracy_L[layer] = known + weight * (accuracy - known)

    @property
    def accuracy_L(self) -> NDArray[np.float64]:
        """Mean load accuracy of each layer's newest predictions; NaN where there were none."""
        return self._accuracy_L.copy()
