"""The control loop of one model.

It learns expert loads (what came true, and what a look-ahead predictor expects), asks the
planner for replicas and hands the plan to the function platform. It runs beside the token path:
nothing in the engine waits for it. It must not know processes, sockets, engines or torch.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from moeless.control.layer_searches import LayerSearches
from moeless.control.pace import Pace
from moeless.control.search import InlineSearcher, Searcher, as_searching, inherit_loads
from moeless.core.events import PlanFailed, PlanMade, SearchTaken
from moeless.core.plan import LoadArray, Plan, PlanRequest
from moeless.core.policy_set import PolicySet
from moeless.core.ports import Clock, EventSink, Placement
from moeless.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """How the control loop of one model works.

    Args:
        model: Model id, for events.
        num_layers: L.
        num_experts: E.
        lookahead: d, the layers that a look-ahead predictor sees ahead; 0 when loads are
            predicted from history alone. The first d layers of an iteration have no look-ahead
            and are planned from history. Policies that do not use forecasts plan all layers from
            history whatever this says.
        share: Part of one core that deciding may take while plans would not change anyway: they
            are made for several steps then. None has every layer planned in every step.
    """

    model: str
    num_layers: int
    num_experts: int
    lookahead: int = 0
    share: float | None = None


class Controller:
    """Turns loads into plans.

    Args:
        config: Shape of the model and prediction distance.
        policies: Predict from history and decide replicas; say how often, and from what.
        placement: The function platform.
        clock: For the decision times in events.
        sink: Receives ``PlanMade``, ``PlanFailed`` and ``SearchTaken``.
        searcher: Carries out the searches of planners that have any; None does at once.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        policies: PolicySet,
        placement: Placement,
        clock: Clock,
        sink: EventSink,
        searcher: Searcher | None = None,
    ) -> None:
        self._config = config
        self._policies = policies
        self._placement = placement
        self._clock = clock
        self._sink = sink
        self._heeds_forecasts = policies.uses_forecasts and policies.replan_every_s is None
        self._lookahead = config.lookahead if self._heeds_forecasts else 0
        searching = as_searching(policies.planner)
        self._searches = (
            None if searching is None else LayerSearches(searching, searcher or InlineSearcher())
        )
        self._planned_s_L = np.full(config.num_layers, -np.inf)
        self._pace = None if config.share is None else Pace(config.num_layers, share=config.share)

    @property
    def adaptive(self) -> bool:
        """Whether plans follow loads."""
        return self._policies.adaptive

    def inherit(self, earlier: Self) -> None:
        """Take over what another controller of the model knows of loads and of time.

        Args:
            earlier: One with the same policies, for other devices; it is not used any more.
        """
        history = earlier._policies.history
        self._policies = replace(self._policies, history=history)
        if self._pace is not None and earlier._pace is not None:
            self._pace = earlier._pace
        searching = as_searching(self._policies.planner)
        if searching is not None:
            inherit_loads(searching, earlier._policies.planner)

    def start(self) -> None:
        """Plan every layer before the first step, for uniform loads."""
        uniform_E = np.ones(self._config.num_experts)
        for layer in range(self._config.num_layers):
            self._plan(step=0, layer=layer, load_E=uniform_E)

    def replan(self, layer: int, *, step: int, load_E: LoadArray) -> None:
        """Plan a layer again for a load that was planned for before: capacities have changed.

        Args:
            layer: MoE layer.
            step: Iteration of that load.
            load_E: Tokens per expert, float64 [E].
        """
        self._plan(step=step, layer=layer, load_E=load_E)

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Take the load that came true, and plan the next step from history where it is due.

        It is due for layers that no forecast is made for. Where plans have an interval, it must
        have passed since the layer's last plan.

        Args:
            step: Iteration.
            layer: MoE layer.
            load_E: Tokens per expert, float64 [E].
        """
        began_s = self._clock.now_s()
        if self._pace is not None:
            self._pace.note_step(layer, step=step, now_s=began_s)
        self._take_up_searches(step)
        try:
            self._policies.history.observe(step=step, layer=layer, load_E=load_E)
            if self._searches is not None and self._searches.observe(
                step=step, layer=layer, load_E=load_E
            ):
                self._take_up_searches(step)
            if (self._lookahead and layer >= self._lookahead) or not self._is_due(layer):
                if self._pace is not None:
                    self._pace.note_decision(self._clock.now_s() - began_s)
                return
            expected_E = self._policies.history.predict(step=step + 1, layer=layer)
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            self._report_failure(error, step=step, layer=layer)
            return
        if expected_E is not None:
            self._plan(step=step + 1, layer=layer, load_E=expected_E)

    def forecast(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        """Take what a look-ahead predictor expects of a layer in this step, and plan it.

        Policies that plan from history alone do not heed it.

        Args:
            step: Iteration.
            layer: MoE layer the forecast is for.
            load_E: Expected tokens per expert, float64 [E].
            expected_error: Share of them that the predictor expects to have misplaced, if it
                knows.
        """
        if self._heeds_forecasts:
            self._take_up_searches(step)
            self._plan(step=step, layer=layer, load_E=load_E, expected_error=expected_error)

    def _take_up_searches(self, step: int) -> None:
        if self._searches is None:
            return
        for ended in self._searches.take_up():
            self._sink.emit(
                SearchTaken(
                    time_s=self._clock.now_s(),
                    model=self._config.model,
                    layer=ended.layer,
                    loads=ended.loads,
                )
            )
            if ended.error is not None:
                self._report_failure(ended.error, step=step, layer=ended.layer)

    def _is_due(self, layer: int) -> bool:
        interval_s = self._policies.replan_every_s
        if interval_s is None:
            return True
        return self._clock.now_s() - float(self._planned_s_L[layer]) >= interval_s

    def _plan(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        began_s = self._clock.now_s()
        self._planned_s_L[layer] = began_s
        request = PlanRequest(
            step=step,
            layer=layer,
            load_E=load_E,
            previous_ED=self._placement.planned_ED(layer),
            alive_ED=self._placement.alive_ED(layer),
            capacity_D=self._placement.capacity_D(layer),
            expected_error=expected_error,
            speed_D=self._placement.speed_D(),
        )
        try:
            with nullcontext() if self._searches is None else self._searches.planner_at_rest():
                plan = self._policies.planner.plan(request)
            check_shape(plan, request)
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            self._report_failure(error, step=step, layer=layer)
            return
        if self._pace is not None:
            if plan.replicas_ED.all() and request.alive_ED.all():
                # Everything is everywhere, as on one device that holds all: no load changes that.
                plan = replace(plan, steps=self._pace.most_steps(layer, step=step))
            elif self._stands(layer):
                plan = replace(plan, steps=self._pace.steps(layer, step=step))
        now_s = self._clock.now_s()
        diff = self._placement.apply(plan, decision_s=now_s - began_s)
        self._sink.emit(
            PlanMade(
                time_s=now_s,
                model=self._config.model,
                step=step,
                layer=layer,
                plan_s=now_s - began_s,
                started=len(diff.start),
                retired=len(diff.retire),
                kept=diff.kept,
                replicas=int(np.count_nonzero(plan.replicas_ED)),
                expected_error=expected_error,
            )
        )
        if self._pace is not None:
            self._pace.note_decision(self._clock.now_s() - began_s)

    def _stands(self, layer: int) -> bool:
        return self._searches is not None and self._searches.stands(layer)

    def _report_failure(self, error: Exception, *, step: int, layer: int) -> None:
        """Say that there is no new plan; the one in force stays."""
        self._sink.emit(
            PlanFailed(
                time_s=self._clock.now_s(),
                model=self._config.model,
                step=step,
                layer=layer,
                reason=str(error) or type(error).__name__,
            )
        )


def check_shape(plan: Plan, request: PlanRequest) -> None:
    """Refuse a plan for another number of experts or devices.

    Raises:
        PlanError: It is one.
    """
    found, expected = plan.replicas_ED.shape, request.previous_ED.shape
    if found != expected:
        raise PlanError(
            f"layer {request.layer}: the planner returned replicas {list(found)}, "
            f"expected {list(expected)}"
        )
