"""A splitter that gives devices less while they are slower than the others."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray, ReplicaArray
from moeless.core.ports import Splitter
from moeless.policies.splitters.device_speeds import DeviceSpeeds


class LiveSpeedSplitter:
    """Another splitter, made anew whenever a device has become slow or fast again.

    Args:
        build: Makes one for a cost model.
        cost: The cost model to begin with.
        note_every: Of so many layers the work of one is noted, which takes 40 us.
    """

    def __init__(
        self, build: Callable[[LayerCost], Splitter], cost: LayerCost, *, note_every: int = 4
    ) -> None:
        self._build = build
        self._cost = cost
        self._inner = build(cost)
        self._note_every = note_every
        self._layers = 0
        self._speeds: DeviceSpeeds | None = None

    def split(
        self, count_E: CountArray, replicas_ED: NDArray[np.bool_] | ReplicaArray
    ) -> CountArray:
        """See ``core.ports.Splitter``."""
        return self._inner.split(count_E, replicas_ED)

    def note_work(self, tokens_ED: CountArray, busy_ns_D: NDArray[np.int64]) -> bool:
        """See ``core.ports.Splitter``."""
        self._layers += 1
        if self._layers % self._note_every:
            return False
        if self._speeds is None:
            self._speeds = DeviceSpeeds(self._cost, tokens_ED.shape[1])
        before_D = self._speeds.speed_D
        if not self._speeds.note(tokens_ED, busy_ns_D):
            return False
        if not np.array_equal(before_D, self._speeds.speed_D):
            self._inner = self._build(self._speeds.cost_now())
        return True

    def speed_D(self) -> NDArray[np.float64]:
        """Relative speeds in force [D]; empty before anything was computed."""
        return np.empty(0) if self._speeds is None else self._speeds.speed_D.copy()

    def measured_D(self) -> NDArray[np.float64]:
        """See ``core.ports.Splitter``."""
        return np.empty(0) if self._speeds is None else self._speeds.measured_D.copy()
