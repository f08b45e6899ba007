"""The control loop of one model.

It learns expert loads (what came true, and what a look-ahead predictor expects), asks the
planner for replicas and hands the plan to the function platform. It runs beside the token path:
nothing in the engine waits for it. It must not know processes, sockets, engines or torch.
"""

from dataclasses import dataclass

import numpy as np

from moeless.core.events import PlanFailed, PlanMade
from moeless.core.plan import LoadArray, Plan, PlanRequest
from moeless.core.ports import Clock, EventSink, Placement, Planner, Predictor
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
            and are planned from history.
        adaptive: Whether plans follow loads; a fixed planner is asked once.
    """

    model: str
    num_layers: int
    num_experts: int
    lookahead: int = 0
    adaptive: bool = True


class Controller:
    """Turns loads into plans.

    Args:
        config: Shape of the model and prediction distance.
        predictor: Predicts from history.
        planner: Decides replicas.
        placement: The function platform.
        clock: For the decision times in events.
        sink: Receives ``PlanMade`` and ``PlanFailed``.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        predictor: Predictor,
        planner: Planner,
        placement: Placement,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._config = config
        self._predictor = predictor
        self._planner = planner
        self._placement = placement
        self._clock = clock
        self._sink = sink

    @property
    def adaptive(self) -> bool:
        """Whether plans follow loads."""
        return self._config.adaptive

    def start(self) -> None:
        """Plan every layer before the first step, for uniform loads."""
        uniform_E = np.ones(self._config.num_experts)
        for layer in range(self._config.num_layers):
            self._plan(step=0, layer=layer, load_E=uniform_E)

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Take the load that came true, and plan the next step from history where needed.

        Args:
            step: Iteration.
            layer: MoE layer.
            load_E: Tokens per expert, float64 [E].
        """
        try:
            self._predictor.observe(step=step, layer=layer, load_E=load_E)
            if self._config.lookahead and layer >= self._config.lookahead:
                return
            expected_E = self._predictor.predict(step=step + 1, layer=layer)
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            self._report_failure(error, step=step, layer=layer)
            return
        if expected_E is not None:
            self._plan(step=step + 1, layer=layer, load_E=expected_E)

    def forecast(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Take what a look-ahead predictor expects of a layer in this step, and plan it.

        Args:
            step: Iteration.
            layer: MoE layer the forecast is for.
            load_E: Expected tokens per expert, float64 [E].
        """
        self._plan(step=step, layer=layer, load_E=load_E)

    def _plan(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        began_s = self._clock.now_s()
        request = PlanRequest(
            step=step,
            layer=layer,
            load_E=load_E,
            previous_ED=self._placement.planned_ED(layer),
            alive_ED=self._placement.alive_ED(layer),
            capacity_D=self._placement.capacity_D(layer),
        )
        try:
            plan = self._planner.plan(request)
            check_shape(plan, request)
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            self._report_failure(error, step=step, layer=layer)
            return
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
                replicas=int(plan.replicas_ED.sum()),
            )
        )

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
