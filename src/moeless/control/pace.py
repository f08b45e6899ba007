"""How often the control loop looks at a layer whose plan is not about to change.

Planning, and the forecasts that it is made from, take time of the machine that computes experts.
While searches find nothing better, a plan would be the same step after step: then it is made for
several steps, so many that deciding takes a small share of the time at most. It must not know
what a plan is.
"""

import math

import numpy as np

_LEARNING = 1 / 32
"""Weight of a new duration in the mean."""

_LONGEST_STEP_S = 0.25
"""A step that seems longer was not one: the engine had nothing to do in between."""

_MOST_STEPS = 64


class Pace:
    """From how long steps and decisions take to the steps that a plan stands for.

    Args:
        num_layers: L.
        share: Part of one core that deciding may take, above 0.
    """

    def __init__(self, num_layers: int, *, share: float) -> None:
        self._num_layers = num_layers
        self._share = share
        self._decision_s = 0.0
        self._step_s = math.nan
        self._last_step_L = np.zeros(num_layers, dtype=np.int64)
        self._last_s_L = np.zeros(num_layers)

    def note_decision(self, seconds: float) -> None:
        """Something of one layer was dealt with: a load taken, or a plan made."""
        self._decision_s += (seconds - self._decision_s) * _LEARNING

    def note_step(self, layer: int, *, step: int, now_s: float) -> None:
        """A layer was looked at.

        Args:
            layer: MoE layer.
            step: The engine's iteration.
            now_s: The time.
        """
        steps = step - int(self._last_step_L[layer])
        if steps <= 0:
            return
        if self._last_step_L[layer] > 0:
            step_s = min(_LONGEST_STEP_S, (now_s - float(self._last_s_L[layer])) / steps)
            if math.isnan(self._step_s):
                self._step_s = step_s
            self._step_s += (step_s - self._step_s) * _LEARNING
        self._last_step_L[layer], self._last_s_L[layer] = step, now_s

    def steps(self, layer: int, *, step: int) -> int:
        """For how many steps from ``step`` on a plan of the layer should stand.

        Layers are looked at in different steps, so that no step has to wait for all of them.

        Args:
            layer: MoE layer.
            step: The first step that the plan is for.
        """
        if math.isnan(self._step_s):
            return 1
        # A layer that is looked at is dealt with twice: what is expected, and what came true.
        spent_s = 2.0 * self._num_layers * self._decision_s
        allowed_s = self._share * self._step_s
        period = _MOST_STEPS
        if spent_s < allowed_s * _MOST_STEPS:
            period = max(1, math.ceil(spent_s / allowed_s))
        return period - (step + layer) % period

    @staticmethod
    def most_steps(layer: int, *, step: int) -> int:
        """The same for a plan that no load could change, whatever deciding takes."""
        return _MOST_STEPS - (step + layer) % _MOST_STEPS
