"""Policies with a part taken away, for ablations, and planners that know what came before.

Only for replays: none of these is worth serving with.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.bootstrap.policies import EPLB_INTERVAL_S, PolicyOptions, build_policy_set
from moeless.core.layer_cost import LayerCost
from moeless.core.plan import Plan, PlanRequest, checked_load
from moeless.core.policy_set import PolicySet
from moeless.core.ports import Clock, Planner
from moeless.policies.planners.feasibility import checked_capacity
from moeless.policies.planners.paper_scaler import scale_replicas
from moeless.policies.predictors import PREDICTORS
from moeless.policies.splitters import SPLITTERS

WHOLE: Final = ""
NO_PREDICTOR, NO_SCALER, NO_PLACER, NO_SPLITTER = (
    "no predictor",
    "no scaler",
    "no placer",
    "no splitter",
)
NO_HISTORY: Final = "no history"
"""Of planners from history: the trace is all that they know, as right after a start."""
JOINT: Final = "no predictor, scaler, placer"
"""The paper's joint ablation: EPLB's history, one replica per expert, each in its own place."""

_PLANS_FROM_HISTORY = ("eplb", "swift")


class _Informed:
    """A planner whose first plan is made for the loads before the trace, not for equal ones."""

    def __init__(self, planner: Planner, history_LE: NDArray[np.float64]) -> None:
        self._planner = planner
        self._history_LE = history_LE

    def plan(self, request: PlanRequest) -> Plan:
        if not request.previous_ED.any():
            request = replace(request, load_E=self._history_LE[request.layer])
        return self._planner.plan(request)


class UnplacedPlanner:
    """Algorithm 1 alone: replicas are counted, and go round from their expert's own device.

    Args:
        cv_threshold: V.
        memory_factor: M_cap as a multiple of E.
    """

    def __init__(self, *, cv_threshold: float, memory_factor: float) -> None:
        self._cv_threshold = cv_threshold
        self._memory_factor = memory_factor

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas.

        Raises:
            PlanError: A load is not a token count, or devices are too small.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        capacity = checked_capacity(request)
        experts, devices = request.num_experts, request.num_devices
        counts = scale_replicas(
            load_E.tolist(),
            cv_threshold=self._cv_threshold,
            max_replicas=min(int(self._memory_factor * experts + 1e-9), sum(capacity)),
            max_per_expert=devices,
        )
        replicas_ED = np.zeros((experts, devices), dtype=np.uint8)
        for expert, count in enumerate(counts):
            home = expert * devices // experts
            replicas_ED[expert, [(home + n) % devices for n in range(count)]] = 1
        return Plan(step=request.step, layer=request.layer, replicas_ED=replicas_ED, load_E=load_E)


def build_variant(
    policy: str,
    without: str,
    *,
    cost: LayerCost,
    options: PolicyOptions,
    clock: Clock,
    history: str,
    history_LE: NDArray[np.float64],
) -> PolicySet:
    """A policy, or what is left of it.

    Args:
        policy: By name.
        without: One of the names above; ``WHOLE`` for all of it.
        cost: What experts and tokens cost.
        options: What policies are told.
        clock: For windows of time.
        history: Predictor of layers that no look-ahead sees.
        history_LE: Loads before the trace.
    """
    if without == NO_SCALER:
        options = replace(options, memory_factor=1.0)
    whole = build_policy_set(policy, cost=cost, options=options, clock=clock, history=history)
    if policy in _PLANS_FROM_HISTORY and without != NO_HISTORY:
        return replace(whole, planner=_Informed(whole.planner, history_LE))
    take = _TAKEN.get(without)
    return whole if take is None else take(whole, options, clock, history_LE)


def _from_history(
    whole: PolicySet, _options: PolicyOptions, clock: Clock, history_LE: NDArray[np.float64]
) -> PolicySet:
    if whole.name == "moeless":
        return replace(whole, uses_forecasts=False)
    return replace(
        whole,
        planner=_Informed(whole.planner, history_LE),
        history=PREDICTORS.create("window", clock=clock, window_s=EPLB_INTERVAL_S),
        replan_every_s=EPLB_INTERVAL_S,
        uses_forecasts=False,
    )


def _unplaced(
    whole: PolicySet, options: PolicyOptions, _clock: Clock, _history_LE: NDArray[np.float64]
) -> PolicySet:
    if whole.name == "moeless":
        # Its first set of replicas, which knows no loads, and is never changed.
        return replace(whole, planner=_First(whole.planner), adaptive=False)
    planner = UnplacedPlanner(
        cv_threshold=options.cv_threshold, memory_factor=options.fixed_memory_factor
    )
    return replace(whole, planner=planner)


def _joint(
    whole: PolicySet, options: PolicyOptions, clock: Clock, history_LE: NDArray[np.float64]
) -> PolicySet:
    planner = UnplacedPlanner(cv_threshold=options.cv_threshold, memory_factor=1.0)
    return _from_history(replace(whole, planner=planner), options, clock, history_LE)


def _evenly_split(
    whole: PolicySet, _options: PolicyOptions, _clock: Clock, _history_LE: NDArray[np.float64]
) -> PolicySet:
    return replace(whole, splitter=SPLITTERS.create("even"))


class _First:
    """Only plans; whatever else a planner can do (search, observe) is hidden."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def plan(self, request: PlanRequest) -> Plan:
        return self._planner.plan(request)


_Take = Callable[[PolicySet, PolicyOptions, Clock, NDArray[np.float64]], PolicySet]
_TAKEN: Final[dict[str, _Take]] = {
    NO_PREDICTOR: _from_history,
    NO_PLACER: _unplaced,
    NO_SPLITTER: _evenly_split,
    JOINT: _joint,
}
