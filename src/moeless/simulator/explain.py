"""Why a layer's replicas are what they are: one layer of one step, in numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.events import InstanceEvicted, InstanceLoaded
from moeless.core.plan import CountArray, ReplicaArray
from moeless.simulator.decisions import DeferredPlacement
from moeless.simulator.layer_timer import TimeModel
from moeless.simulator.stopwatch import TimedPlanner

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """What became of one layer of one step, for whoever explains it.

    Args:
        step: Counted from 0.
        layer: MoE layer.
        gate_s: When its gate spoke.
        count_E: Tokens of each expert, int64 [E].
        warm_ED: Warm replicas at that time [E, D].
        planned_ED: Planned copies at that time, uint8 [E, D].
        share_ED: Tokens of each replica, int64 [E, D].
        seconds: Time of the layer.
    """

    step: int
    layer: int
    gate_s: float
    count_E: CountArray
    warm_ED: BoolArray
    planned_ED: ReplicaArray
    share_ED: CountArray
    seconds: float


class Explainer:
    """Collects what led to one layer's replicas in one step.

    Args:
        step: The step, counted from 0.
        layer: The MoE layer.
        placement: Knows the plan in force.
        planner: Its own reason is added if it has a method ``explain`` that takes a layer.
        time_model: What shares cost in time.
        load_s: Seconds of one load on a free link.
        function_bytes: Bytes of one load.
    """

    def __init__(
        self,
        *,
        step: int,
        layer: int,
        placement: DeferredPlacement,
        planner: TimedPlanner,
        time_model: TimeModel,
        load_s: float,
        function_bytes: int,
    ) -> None:
        self._step = step
        self._layer = layer
        self._placement = placement
        self._planner = planner
        self._time_model = time_model
        self._load_s = load_s
        self._function_bytes = function_bytes
        self._listening = step == 0
        self._loaded: list[InstanceLoaded] = []
        self._evicted: list[InstanceEvicted] = []
        self.explanation: dict[str, Any] | None = None

    def is_asked(self, step: int, layer: int) -> bool:
        """Whether this is the layer and step to explain."""
        return (step, layer) == (self._step, self._layer)

    def note_gate(self, step: int, layer: int) -> None:
        """A gate spoke: from the asked layer's last one on, its loads are of interest."""
        if layer == self._layer:
            if step == self._step - 1:
                self._listening = True
            elif step > self._step:
                self._listening = False

    def note(self, event: InstanceLoaded | InstanceEvicted) -> None:
        """An instance came or went."""
        if not self._listening or event.layer != self._layer or self.explanation is not None:
            return
        if isinstance(event, InstanceLoaded):
            self._loaded.append(event)
        else:
            self._evicted.append(event)

    def explain(self, run: LayerRun) -> None:
        """The asked layer has run."""
        plan = self._placement.plans.get(run.layer)
        reason = getattr(self._planner.planner, "explain", None)
        tokens_D = run.share_ED.sum(axis=0)
        cost = self._time_model.cost
        self.explanation = {
            "step": run.step,
            "layer": run.layer,
            # The engine counts its steps from 1; plans made before the first say 0.
            "planned_for_step": None if plan is None else max(plan.step - 1, 0),
            "expected_load": None if plan is None else plan.load_E.tolist(),
            "true_load": run.count_E.tolist(),
            "planned": _devices_of(run.planned_ED),
            "warm": _devices_of(run.warm_ED),
            "shares": run.share_ED.tolist(),
            "device_tokens": tokens_D.tolist(),
            "ideal_device_tokens": -(-int(tokens_D.sum()) // len(tokens_D)),
            "device_s": self._time_model.device_s(run.share_ED).tolist(),
            "layer_s": run.seconds,
            "bound_s": cost.bound_s(run.count_E, len(tokens_D)),
            "loaded": [
                {
                    "expert": event.expert,
                    "device": event.device,
                    "bytes": event.num_bytes,
                    "load_s": event.load_s,
                    "blocking": event.blocking,
                }
                for event in self._loaded
            ],
            "evicted": [
                {"expert": event.expert, "device": event.device, "reason": event.reason}
                for event in self._evicted
            ],
            "load_price": {"bytes": self._function_bytes, "link_s": self._load_s},
            "reason": str(reason(run.layer)) if callable(reason) else None,
        }


def _devices_of(copies_ED: BoolArray | ReplicaArray) -> list[list[int]]:
    """The devices of each expert, as often as they have copies of it."""
    devices_D = np.arange(copies_ED.shape[1])
    return [np.repeat(devices_D, row_D).tolist() for row_D in copies_ED]
