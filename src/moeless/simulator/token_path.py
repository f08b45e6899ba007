"""The token path in simulated time: what an engine and its dispatcher do, without computing.

Mirrors ``moeless.functions.token_path.dispatch``: planned warm replicas first, unplanned warm
ones where there are none, and a demand for experts that are warm nowhere, while the others are
computed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeless.core.copies import copies_held_ED, divides_by_copies
from moeless.core.plan import CountArray
from moeless.core.ports import Splitter
from moeless.errors import FunctionError, UnavailableError
from moeless.functions.links.board import Board
from moeless.functions.platform.demands import DemandResult
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.platform.platform import Platform
from moeless.simulator.decisions import DeferredIntake
from moeless.simulator.event_loop import EventLoop
from moeless.simulator.explain import Explainer, LayerRun
from moeless.simulator.forecasts import LoadForecast
from moeless.simulator.layer_timer import LayerTimer
from moeless.simulator.recording import Recording
from moeless.workloads.routing_trace import RoutingTrace

BoolArray = NDArray[np.bool_]


@dataclass(kw_only=True, eq=False)
class TokenPath:
    """Runs the steps of a trace one after the other.

    Args:
        trace: Steps.
        start_s: Simulated time of the trace's zero.
        loop: Simulated time.
        platform: Where experts that are warm nowhere are demanded.
        model: The model on it.
        board: Shared by both.
        splitter: Divides tokens over replicas.
        timer: How long a layer takes.
        forecast: Look-ahead, or None when loads are predicted from history alone.
        lookahead: Its distance d.
        intake: Told of new loads; None for policies whose plans do not follow loads.
        misc_s: Time of everything else, per layer.
        recording: Filled step by step.
        explainer: Shown the layer runs, or None.
        on_step: Called with each step's index before it starts.
    """

    trace: RoutingTrace
    start_s: float
    loop: EventLoop
    platform: Platform
    model: ModelPlacement
    board: Board
    splitter: Splitter
    timer: LayerTimer
    forecast: LoadForecast | None
    lookahead: int
    intake: DeferredIntake | None
    misc_s: float
    recording: Recording
    explainer: Explainer | None
    on_step: Callable[[int], None]
    finished: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert self.trace.time_s_N is not None
        self._arrival_s: list[float] = (self.trace.time_s_N - self.trace.time_s_N[0]).tolist()
        self._divides_by_copies = divides_by_copies(self.splitter)
        self._tickets = 0
        self._waiting = False
        self._result: DemandResult | None = None
        self._run = self._run_steps()

    @property
    def is_waiting(self) -> bool:
        """Whether tokens wait for loads."""
        return self._waiting

    def resume(self) -> None:
        """Go on until the next moment at which something else may happen."""
        try:
            wake_s = next(self._run)
        except StopIteration:
            self.finished = True
            self.loop.stop()
            return
        if wake_s is None:
            self._waiting = True
            self.notice_change()
        else:
            self.loop.at(wake_s, self.resume)

    def notice_change(self) -> None:
        """Something happened on the platform: perhaps it was what tokens wait for."""
        if not self._waiting:
            return
        results = self.platform.finished()
        if results:
            self._waiting = False
            self._result = results[-1]
            self.resume()

    def _run_steps(self) -> Iterator[float | None]:
        clock, recording = self.loop.clock, self.recording
        for step in range(len(self.trace)):
            begin_s = max(self.start_s + self._arrival_s[step], clock.time_s)
            yield begin_s
            self.on_step(step)
            self.board.step[0] = step + 1
            recording.start_s_S[step] = clock.time_s - self.start_s
            count_LE = self.trace.loads_NLE[step].astype(np.int64)
            expected_LE = self.forecast.expected_LE(step) if self.forecast else None
            busy_L = count_LE.any(axis=1).tolist()
            for layer, busy in enumerate(busy_L):
                if busy:
                    yield from self._run_layer(step, layer, count_LE[layer], expected_LE)
                else:
                    self._note_warm(step, layer)
            self.board.layer[0] = -1  # the step has ended
        recording.end_s = clock.time_s - self.start_s

    def _run_layer(
        self,
        step: int,
        layer: int,
        count_E: CountArray,
        expected_LE: NDArray[np.float64] | None,
    ) -> Iterator[float | None]:
        board, clock, recording = self.board, self.loop.clock, self.recording
        if self.model.held_back:
            board.layer[0] = -1  # the layer before has ended, this one has not begun
            self.platform.release_held_back(self.model)
        gate_s = clock.time_s
        board.layer[0] = layer
        self._note_warm(step, layer)
        warm_ED, planned_ED = board.warm_LED[layer], board.planned_LED[layer]
        usable_ED: BoolArray = np.logical_and(warm_ED, planned_ED)
        seen = None
        if self.explainer is not None and self.explainer.is_asked(step, layer):
            seen = (warm_ED.astype(np.bool_), planned_ED.copy())
        if self.intake is not None:
            self._announce(step, layer, count_E, expected_LE, self.intake)

        open_E, device_tokens_D, done_ED = count_E, recording.device_tokens_SLD[step, layer], None
        while True:
            ticket, ready_E = self._demand_missing(layer, open_E, usable_ED)
            share_ED = self._split(layer, ready_E, usable_ED)
            tokens_D = np.add.reduce(share_ED, axis=0)
            device_tokens_D += tokens_D
            run_s, busy_s = self.timer.measure(share_ED, tokens_D)
            recording.busy_s_SL[step, layer] += busy_s
            end_s = clock.time_s + run_s
            done_ED = share_ED if done_ED is None else done_ED + share_ED
            if ticket is None:
                seconds = (clock.time_s - gate_s) + run_s
                yield end_s + self.misc_s
                break
            yield end_s
            yield from self._await_demand(layer)
            open_E = open_E - ready_E
            usable_ED = board.warm_LED[layer].astype(np.bool_)
        np.copyto(board.used_ns_LED[layer], int(end_s * 1e9), where=done_ED > 0)
        recording.layer_s_SL[step, layer] = seconds
        if seen is not None and self.explainer is not None:
            run = LayerRun(
                step=step,
                layer=layer,
                gate_s=gate_s,
                count_E=count_E,
                warm_ED=seen[0],
                planned_ED=seen[1],
                share_ED=done_ED,
                seconds=seconds,
            )
            self.explainer.explain(run)

    def _split(self, layer: int, ready_E: CountArray, usable_ED: BoolArray) -> CountArray:
        if self._divides_by_copies:
            copies_ED = copies_held_ED(usable_ED, self.board.planned_LED[layer])
            return self.splitter.split(ready_E, copies_ED)
        return self.splitter.split(ready_E, usable_ED)

    def _note_warm(self, step: int, layer: int) -> None:
        held_ED = self.board.warm_LED[layer]
        warm = np.count_nonzero(held_ED)
        if self._divides_by_copies:
            held_ED = copies_held_ED(held_ED, self.board.planned_LED[layer])
            warm = held_ED.sum(dtype=np.int64)
        self.recording.warm_SL[step, layer] = warm
        if self.recording.replicas_SLED is not None:
            self.recording.replicas_SLED[step, layer] = held_ED
        self.recording.keep_sample(step, layer, held_ED)
        if self.explainer is not None:
            self.explainer.note_gate(step, layer)

    def _announce(
        self,
        step: int,
        layer: int,
        count_E: CountArray,
        expected_LE: NDArray[np.float64] | None,
        intake: DeferredIntake,
    ) -> None:
        board = self.board
        ahead = layer + self.lookahead
        if expected_LE is not None and ahead < len(expected_LE):
            unknown = math.nan  # traces do not say
            board.post_forecast(ahead, expected_LE[ahead], error=unknown, step=step + 1)
        board.post_actual(layer, count_E, step=step + 1)
        intake.announce()

    def _demand_missing(
        self, layer: int, open_E: CountArray, usable_ED: BoolArray
    ) -> tuple[int | None, CountArray]:
        """Fall back on unplanned warm replicas, and demand experts that have none at all."""
        without_E = ~np.logical_or.reduce(usable_ED, axis=1)
        if not open_E[without_E].any():
            return None, open_E
        without_E &= open_E > 0
        warm_ED = self.board.warm_LED[layer].view(np.bool_)
        usable_ED[without_E] = warm_ED[without_E]
        missing = np.flatnonzero(without_E & ~warm_ED.any(axis=1))
        if not len(missing):
            return None, open_E
        self._tickets += 1
        ready_E = open_E.copy()
        ready_E[missing] = 0
        self.platform.demand(
            self.model, ticket=self._tickets, layer=layer, experts=missing.tolist()
        )
        return self._tickets, ready_E

    def _await_demand(self, layer: int) -> Iterator[None]:
        yield None
        result = self._result
        if result is None or result.ticket != self._tickets:
            raise FunctionError(f"layer {layer}: the demand that tokens wait for got lost")
        if result.error is not None:
            raise UnavailableError(result.error)
