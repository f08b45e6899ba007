"""A model's placement as a planner sees it: only the devices that are in use.

Planners then plan exactly as if the other devices did not exist: those that may join later cost
nothing, and bounds over all devices stay right. Single-threaded like the platform.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moeless.core.plan import CountArray, Plan, PlanDiff, ReplicaArray, SpeedArray
from moeless.core.ports import Placement


class DeviceView:
    """Some devices of a placement. Implements ``core.ports.Placement``.

    Args:
        placement: All devices.
        devices: Those to show, ascending.
    """

    def __init__(self, placement: Placement, devices: Sequence[int]) -> None:
        self._placement = placement
        self._num_devices = len(devices)
        first = devices[0] if devices else 0
        in_a_row = list(devices) == list(range(first, first + len(devices)))
        self._columns = slice(first, first + len(devices)) if in_a_row else np.array(devices)

    @property
    def num_devices(self) -> int:
        """Devices that are shown."""
        return self._num_devices

    def alive_ED(self, layer: int) -> ReplicaArray:
        """Warm replicas of a layer, uint8 [E, D]."""
        return np.ascontiguousarray(self._placement.alive_ED(layer)[:, self._columns])

    def planned_ED(self, layer: int) -> ReplicaArray:
        """Copies in the layer's plan in force, uint8 [E, D]."""
        return np.ascontiguousarray(self._placement.planned_ED(layer)[:, self._columns])

    def capacity_D(self, layer: int) -> CountArray:
        """Replicas of the layer that each device may hold, int64 [D]."""
        return self._placement.capacity_D(layer)[self._columns]

    def speed_D(self) -> SpeedArray | None:
        """Relative speeds that devices have shown of late [D]; None where all are equal."""
        speed_D = self._placement.speed_D()
        if speed_D is None:
            return None
        shown_D = np.ascontiguousarray(speed_D[self._columns])
        return shown_D if (shown_D != 1.0).any() else None

    def apply(self, plan: Plan, *, decision_s: float) -> PlanDiff:
        """Put a plan in force; the difference names devices by their own numbers."""
        shape = len(plan.replicas_ED), self._placement.num_devices
        replicas_ED = np.zeros(shape, dtype=np.uint8)
        replicas_ED[:, self._columns] = plan.replicas_ED
        whole = replace(plan, replicas_ED=replicas_ED)
        return self._placement.apply(whole, decision_s=decision_s)
