"""The supervisor's side of a recorded run, lived through once more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.control.controller import Controller
from moeless.core.events import (
    DemandTaken,
    InstanceEvicted,
    InstanceLoaded,
    LoadTaken,
    SearchTaken,
    SupervisorWoken,
)
from moeless.core.model import FunctionId
from moeless.core.plan import CountArray, LoadArray
from moeless.errors import TraceError, UnavailableError
from moeless.functions.links.board import Board
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.platform.platform import Platform
from moeless.simulator.board_history import BoardHistory
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import LoadForecast
from moeless.simulator.recorded_host import RecordedHost
from moeless.simulator.recorded_searcher import RecordedSearcher
from moeless.simulator.recorded_times import Look, Moment, RecordedTimes
from moeless.workloads.routing_trace import RoutingTrace

BoolArray = NDArray[np.bool_]


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
        searcher: Carries out the control loop's searches.
        hosts: One per device [D].
        clock: The supervisor's: set to the time of each moment.
    """

    times: RecordedTimes
    trace: RoutingTrace
    forecast: LoadForecast | None
    controller: Controller
    platform: Platform
    model: ModelPlacement
    board: Board
    searcher: RecordedSearcher
    hosts: Sequence[RecordedHost]
    clock: SimulatedClock

    def __post_init__(self) -> None:
        self._next = 0
        self._tickets = 0
        self._demand: tuple[int, tuple[int, ...]] | None = None
        self._history = BoardHistory(self.board)
        self._used: dict[tuple[int, int], BoolArray] = {}
        self._known_step_L = [0] * len(self.board.used_step_L)

    # What the token path asks

    def see(self, step: int, layer: int, number: int, open_E: CountArray) -> Look:
        """What the token path found when it looked, after all that had happened by then.

        Args:
            step: Counted from 0.
            layer: MoE layer.
            number: How many times it has looked in this layer-step.
            open_E: Tokens that are still to be computed [E].

        Raises:
            TraceError: It cannot have found that.
        """
        where = f"step {step}, layer {layer}"
        seen = self.times.looks.get((step, layer))
        if seen is None or number >= len(seen.looks):
            raise TraceError(f"{where}: the run looked {number} times, the replay once more")
        look = seen.looks[number]
        self._relive_until(look)
        if number:
            self._check_left(where, layer, seen.looks[number - 1])
            may_ED = self._history.may_be_warm(layer, look.usable_ED)
        else:
            may_ED = self._may_be_found_first(layer, look.usable_ED, open_E)
        if not may_ED.all():
            expert, device = np.argwhere(~may_ED)[0].tolist()
            found = "found" if look.usable_ED[expert, device] else "did not find"
            raise TraceError(
                f"{where}, look {number}: the run {found} a replica of expert {expert} on device "
                f"{device} that it could use, the replay does otherwise"
            )
        return look

    def demand(self, layer: int, experts: Sequence[int]) -> None:
        """Tokens wait for experts of a layer."""
        self._demand = (layer, tuple(experts))

    def await_demand(self) -> None:
        """Do what happened until the experts were warm.

        Raises:
            TraceError: They never were in the run.
            UnavailableError: They cannot be.
        """
        while not (results := self.platform.finished()):
            if self._next == len(self.times.moments):
                raise TraceError("the record ends while tokens of the replay wait for experts")
            self._relive()
        if results[-1].error is not None:
            raise UnavailableError(results[-1].error)

    def note_used(self, step: int, layer: int, used_ED: BoolArray) -> None:
        """The token path has used replicas of a layer; the platform hears of it when it did."""
        self._used[step, layer] = used_ED

    def finish(self) -> None:
        """Do all that is left.

        Raises:
            TraceError: What was recorded cannot happen here.
        """
        while self._next < len(self.times.moments):
            self._relive()

    # What it may have found

    def _relive_until(self, look: Look) -> None:
        moments = self.times.moments
        while self._next < len(moments) and moments[self._next].began_s < look.looked_s:
            self._relive()
            self._history.forget_before(self._first_unfinished(look.began_s))
        self._history.forget_before(self._first_unfinished(look.began_s))

    def _first_unfinished(self, time_s: float) -> int:
        """The first moment of those lived through that may not have been over at a time."""
        moments, number = self.times.moments, self._next
        while number > 0 and (number == len(moments) or moments[number].began_s > time_s):
            number -= 1
        return number

    def _may_be_found_first(
        self, layer: int, usable_ED: BoolArray, open_E: CountArray
    ) -> BoolArray:
        """Where the first look may have found what it did.

        It finds planned replicas; of an expert with tokens that has none, it looks for others.
        """
        none_ED = np.zeros_like(usable_ED)
        planned_ED = self._history.may_be_usable(layer, usable_ED)
        no_planned_E = self._history.may_be_usable(layer, none_ED).all(axis=1) & (open_E > 0)
        any_ED = self._history.may_be_warm(layer, usable_ED)
        falls_back_E = no_planned_E & any_ED.all(axis=1)
        found_ED: BoolArray = planned_ED | falls_back_E[:, None]
        # Where it found no planned one it did look for others.
        found_nothing_E = ~usable_ED.any(axis=1) & (open_E > 0)
        found_ED[found_nothing_E] &= any_ED[found_nothing_E]
        return found_ED

    def _check_left(self, where: str, layer: int, look: Look) -> None:
        for expert, device in np.argwhere(look.left_ED).tolist():
            function = self.model.function(layer, expert)
            if not self.hosts[device].may_have_missed(
                function, from_s=look.looked_s, until_s=look.answered_s
            ):
                raise TraceError(
                    f"{where}: in the run expert {expert} had left device {device} when it was "
                    f"invoked, in the replay it had not"
                )

    # What happened

    def _relive(self) -> None:
        moment = self.times.moments[self._next]
        self._history.note(self._next, _becomes_warm(moment))
        self._next += 1
        self.clock.time_s = moment.began_s
        for host in self.hosts:
            host.now_s = moment.began_s
        self.board.layer[0] = moment.layer
        event = moment.event
        if isinstance(event, SupervisorWoken):
            self._wake(event)
        elif isinstance(event, LoadTaken):
            self._take_load(event, moment.searches)
        elif isinstance(event, DemandTaken):
            self._take_demand(event)
        elif isinstance(event, InstanceLoaded):
            function = self._end_order(event)
            self.platform.loaded(event.device, function)
        elif isinstance(event, InstanceEvicted):
            function = self._end_order(event)
            self.platform.evicted(event.device, function, reason=event.reason)
        if moment.ends_loads and self.platform.has_demands:
            self.platform.advance()

    def _wake(self, event: SupervisorWoken) -> None:
        for layer, step in event.used:
            for past in range(self._known_step_L[layer], step):
                seen, used_ED = self.times.looks.get((past, layer)), self._used.get((past, layer))
                if seen is not None and used_ED is not None:
                    np.copyto(self.board.used_ns_LED[layer], seen.used_ns, where=used_ED)
            self._known_step_L[layer] = step
        if event.cause == "tick":
            self.platform.tick()

    def _take_load(self, event: LoadTaken, searches: Sequence[SearchTaken]) -> None:
        step, layer = event.step, event.layer
        load_E: LoadArray
        if event.kind == "forecast" and self.forecast is not None:
            load_E = self.forecast.expected_LE(step - 1)[layer]
        else:
            load_E = self.trace.loads_NLE[step - 1, layer].astype(np.float64)
        if not math.isclose(load_E.sum(), event.tokens):
            raise TraceError(
                f"step {step}, layer {layer}: the run was told of {event.tokens:g} tokens "
                f"({event.kind}), the trace has {load_E.sum():g}; replay the trace that was run"
            )
        expected = event.kind == "forecast"
        tell = self.controller.forecast if expected else self.controller.observe
        self.searcher.before_load(None if expected else layer, searches)
        tell(step=step, layer=layer, load_E=load_E)
        self.searcher.after_load()

    def _take_demand(self, event: DemandTaken) -> None:
        if self._demand != (event.layer, event.experts):
            raise TraceError(
                f"{event.time_s:.6f} s: the run demanded experts {list(event.experts)} of layer "
                f"{event.layer}, the replay {self._demand or 'nothing'}"
            )
        self._demand = None
        self._tickets += 1
        self.platform.demand(
            self.model, ticket=self._tickets, layer=event.layer, experts=event.experts
        )

    def _end_order(self, event: InstanceLoaded | InstanceEvicted) -> FunctionId:
        function = self.model.function(event.layer, event.expert)
        self.hosts[event.device].end(function, event)
        return function


def _becomes_warm(moment: Moment) -> tuple[int, int, int] | None:
    event = moment.event
    if isinstance(event, InstanceLoaded):
        return event.layer, event.expert, event.device
    return None
