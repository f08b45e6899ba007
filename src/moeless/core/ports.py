"""Ports: the only ways in which the packages of MoEless depend on each other's behaviour.

Policies (predictors, planners, splitters, keep-alive rules) are chosen by name through
``moeless.policies``; the control loop and the function platform see these protocols only.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeless.core.events import Event
from moeless.core.layer_cost import LayerCost
from moeless.core.model import FunctionId
from moeless.core.plan import (
    CountArray,
    LoadArray,
    Plan,
    PlanDiff,
    PlanRequest,
    ReplicaArray,
    SpeedArray,
)


class Clock(Protocol):
    """Monotonic time; the real one is ``SystemClock``, tests bring their own."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class Predictor(Protocol):
    """Expects the load of a layer from what was observed before."""

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Learn the load that came true, tokens [E]."""
        ...

    def predict(self, *, step: int, layer: int) -> LoadArray | None:
        """Expected tokens [E] of a layer in a step, or None while nothing is known."""
        ...


class Planner(Protocol):
    """Decides which replicas should exist. Pure: equal requests give equal plans."""

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas.

        Every expert with a positive expected load has at least one replica, and no device has
        more copies than its capacity. An expert has several copies on a device only if the
        planner's slots are fixed and its splitter divides by copies (``core.copies``).

        Raises:
            PlanError: The capacities cannot hold one replica of each expert.
        """
        ...


class Splitter(Protocol):
    """Divides true token counts over warm replicas. Pure, deterministic, on the token path.

    A splitter with a true attribute ``divides_by_copies`` is given copies instead of flags. One
    with a method ``note_work(tokens_ED, busy_ns_D)`` is told what came of its splits: the tokens
    that devices got of a layer, and how long each computed (0 for one that gave no answer). Its
    method ``speed_D()`` tells the relative speeds that it heeds, and ``measured_D()``, which
    plans are made for, those that it has measured (0 where it knows too little); ``note_work``
    returns whether there are new ones.
    """

    def split(
        self, count_E: CountArray, replicas_ED: NDArray[np.bool_] | ReplicaArray
    ) -> CountArray:
        """Divide tokens.

        Args:
            count_E: Tokens routed to each expert, int64 [E].
            replicas_ED: Usable replicas, bool [E, D], or the copies behind each of them, uint8;
                at least one where ``count_E`` is positive.

        Returns:
            Tokens of each replica, int64 [E, D]; rows sum to ``count_E``, zero off the replicas.
        """
        ...


class KeepAlive(Protocol):
    """Says how long an idle instance stays warm."""

    def used(self, function: FunctionId, *, at_s: float) -> None:
        """An instance of the function was used; told now and then, not for each use.

        Args:
            function: The function.
            at_s: The end of its newest use so far, by the platform's clock.
        """
        ...

    def keep_s(self, function: FunctionId, *, idle_s: float) -> float:
        """Seconds an instance may go unused before it is retired.

        Args:
            function: The function.
            idle_s: How long the instance has been idle already.
        """
        ...


class Placement(Protocol):
    """What the control loop may ask of, and tell, the function platform."""

    @property
    def num_devices(self) -> int:
        """D."""
        ...

    def alive_ED(self, layer: int) -> ReplicaArray:
        """Warm replicas of a layer, uint8 [E, D]."""
        ...

    def planned_ED(self, layer: int) -> ReplicaArray:
        """Copies in the layer's plan in force, uint8 [E, D]."""
        ...

    def capacity_D(self, layer: int) -> CountArray:
        """Replicas of the layer that each device may hold, int64 [D]."""
        ...

    def speed_D(self) -> SpeedArray | None:
        """Relative speeds that devices have shown of late [D]; None where all are equal."""
        ...

    def apply(self, plan: Plan, *, decision_s: float) -> PlanDiff:
        """Put a plan in force: start what is missing, release what is no longer wanted.

        Returns at once; loads happen in the background.

        Args:
            plan: The plan.
            decision_s: How long the planner took, for the record.
        """
        ...


class TimeModel(Protocol):
    """How long one layer's experts take, for simulation and for policies that optimise time."""

    @property
    def cost(self) -> LayerCost:
        """The linear model, exact or the closest one; what splitters and planners optimise."""
        ...

    def layer_s(self, tokens_ED: CountArray) -> float:
        """Time of the layer in seconds, transfers included.

        Args:
            tokens_ED: Tokens of each replica, int64 [E, D].
        """
        ...


class EventSink(Protocol):
    """Receives telemetry events; must be cheap and must not raise.

    One that can lose some says in an attribute ``lost`` how many.
    """

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...
