"""When things happened in a run of real workers, imposed on its replay.

A run with a file of events says in which order its supervisor dealt with loads, ends of loads and
evictions, and for which position of the engine. A replay that has these things happen in that
order, and before the same gates, must make the same decisions: how long plans and loads take is
all that a simulator has to guess. Nothing of what was decided is taken from the record.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.control.controller import Controller
from moeless.core.events import (
    Event,
    InstanceEvicted,
    InstanceLoaded,
    LoadFailed,
    LoadTaken,
    SupervisorWoken,
    WorkerLost,
)
from moeless.core.model import FunctionId
from moeless.core.plan import LoadArray
from moeless.errors import TraceError
from moeless.functions.board import Board
from moeless.functions.model_placement import ModelPlacement
from moeless.functions.platform import Platform
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import LoadForecast
from moeless.workloads.routing_trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class GateTime:
    """When a layer's gate spoke, by the clock of the events.

    Args:
        began_s: Before the engine looked at the board.
        looked_s: After it.
        usable_ED: The replicas that it divided tokens over, bool [E, D]. They tell whether it
            looked before or after what the supervisor was doing in the meantime.
    """

    began_s: float
    looked_s: float
    usable_ED: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that the supervisor dealt with.

    Args:
        began_s: When.
        layer: The layer whose gate had spoken last, as far as it knew.
        event: What it had heard: a load, the end of a load or of an eviction, or only that it was
            time to look around.
    """

    began_s: float
    layer: int
    event: Event


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTimes:
    """The order of a run.

    Args:
        moments: What the supervisor dealt with, one thing after the other.
        gates: Every gate by (step, layer), steps counted from 0.
    """

    moments: Sequence[Moment]
    gates: Mapping[tuple[int, int], GateTime]

    @classmethod
    def of(
        cls, events: Iterable[Event], gates: Mapping[tuple[int, int], GateTime]
    ) -> "RecordedTimes":
        """Put events in order.

        Args:
            events: As a run recorded them.
            gates: See the class.

        Raises:
            TraceError: Something failed in that run, which cannot be replayed.
        """
        moments, layer = [], -1
        for event in events:
            if isinstance(event, LoadFailed | WorkerLost):
                raise TraceError(f"the recorded run had a failure: {event.reason}")
            if isinstance(event, SupervisorWoken):
                layer = event.layer
            if isinstance(event, SupervisorWoken | LoadTaken | InstanceLoaded | InstanceEvicted):
                moments.append(Moment(began_s=event.time_s, layer=layer, event=event))
        return cls(moments=moments, gates=gates)


class RecordedHost:
    """A device whose loads and evictions end when the record says so. A ``HostPort``."""

    def __init__(self) -> None:
        self.loading: set[FunctionId] = set()
        self.evicting: dict[FunctionId, str] = {}

    def load(self, function: FunctionId) -> None:
        """Begin to load."""
        self.loading.add(function)

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict."""
        self.evicting[function] = reason


@dataclass(kw_only=True, eq=False)
class RecordedControl:
    """Has the control loop and the platform hear what they heard in the run, when they did.

    Args:
        times: The order of the run.
        trace: The loads that came true.
        forecast: The loads that were expected, or None.
        controller: The control loop.
        platform: The platform, whose hosts are ``hosts``.
        model: The model on it.
        board: Shared with the token path.
        hosts: One per device [D].
        clock: Set to the run's times; whatever the time model says, it never goes back.
    """

    times: RecordedTimes
    trace: RoutingTrace
    forecast: LoadForecast | None
    controller: Controller
    platform: Platform
    model: ModelPlacement
    board: Board
    hosts: Sequence[RecordedHost]
    clock: SimulatedClock

    def __post_init__(self) -> None:
        self._next = 0

    def before_gate(self, step: int, layer: int) -> None:
        """Do all that was over when a gate spoke, and what it saw of what was going on.

        Args:
            step: Counted from 0.
            layer: MoE layer.

        Raises:
            TraceError: What was recorded cannot happen here.
        """
        moments, gate = self.times.moments, self.times.gates[step, layer]
        while self._next + 1 < len(moments) and moments[self._next + 1].began_s <= gate.began_s:
            self._relive()
        while self._next < len(moments) and moments[self._next].began_s < gate.looked_s:
            if self._is_seen(step, layer):
                break
            self._relive()
        self._advance(gate.began_s)

    def finish(self) -> None:
        """Do all that is left.

        Raises:
            TraceError: What was recorded cannot happen here.
        """
        while self._next < len(self.times.moments):
            self._relive()

    def before_fallback(self, step: int, layer: int, without_E: NDArray[np.bool_]) -> None:
        """Do what happened until the engine turned to replicas that are not planned.

        Args:
            step: Counted from 0.
            layer: MoE layer.
            without_E: The experts that it did so for, bool [E].

        Raises:
            TraceError: What was recorded cannot happen here.
        """
        moments, gate = self.times.moments, self.times.gates[step, layer]
        warm_ED = self.board.warm_LED[layer]
        while self._next < len(moments) and moments[self._next].began_s < gate.looked_s:
            if np.array_equal(warm_ED[without_E] > 0, gate.usable_ED[without_E]):
                break
            self._relive()

    def _is_seen(self, step: int, layer: int) -> bool:
        """Whether the board shows the planned replicas that the engine found."""
        seen_ED = self.times.gates[step, layer].usable_ED
        planned_ED = self.board.planned_LED[layer] > 0
        usable_ED = planned_ED & (self.board.warm_LED[layer] > 0)
        without_E = (self.trace.loads_NLE[step, layer] > 0) & ~usable_ED.any(axis=1)
        # It took unplanned replicas of an expert only where it saw no planned one.
        fell_back_E = (seen_ED & ~planned_ED).any(axis=1)
        same_E = (usable_ED == seen_ED).all(axis=1)
        return bool(np.where(without_E, fell_back_E, same_E).all())

    def _relive(self) -> None:
        moment = self.times.moments[self._next]
        self._next += 1
        layer = self.board.layer
        now = int(layer[0])
        self._advance(moment.began_s)
        layer[0] = moment.layer
        event = moment.event
        if isinstance(event, LoadTaken):
            self._take(event)
        elif isinstance(event, InstanceLoaded):
            self._end_load(event)
        elif isinstance(event, InstanceEvicted):
            self._end_eviction(event)
        elif isinstance(event, SupervisorWoken) and event.cause == "tick":
            self.platform.tick()
        layer[0] = now

    def _advance(self, time_s: float) -> None:
        self.clock.time_s = max(self.clock.time_s, time_s)

    def _take(self, event: LoadTaken) -> None:
        step, layer = event.step, event.layer
        load_E: LoadArray
        if event.kind == "forecast" and self.forecast is not None:
            load_E = self.forecast.expected_LE(step - 1)[layer]
        else:
            load_E = self.trace.loads_NLE[step - 1, layer].astype(np.float64)
        if not np.isclose(load_E.sum(), event.tokens):
            raise TraceError(
                f"step {step}, layer {layer}: the run was told of {event.tokens:g} tokens "
                f"({event.kind}), the trace has {load_E.sum():g}; replay the trace that was run"
            )
        tell = self.controller.forecast if event.kind == "forecast" else self.controller.observe
        tell(step=step, layer=layer, load_E=load_E)

    def _end_load(self, event: InstanceLoaded) -> None:
        function = FunctionId(self.model.spec.model_id, event.layer, event.expert)
        loading = self.hosts[event.device].loading
        if function not in loading:
            raise TraceError(
                f"the run loaded {function} onto device {event.device}, the replay does not"
            )
        loading.discard(function)
        self.platform.loaded(event.device, function)

    def _end_eviction(self, event: InstanceEvicted) -> None:
        function = FunctionId(self.model.spec.model_id, event.layer, event.expert)
        evicting = self.hosts[event.device].evicting
        if function not in evicting:
            raise TraceError(
                f"the run evicted {function} from device {event.device}, the replay does not"
            )
        self.platform.evicted(event.device, function, reason=evicting.pop(function))
