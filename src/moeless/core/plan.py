"""Plans: which replicas of a layer's experts should exist, and on which devices."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeless.errors import PlanError

LoadArray = NDArray[np.float64]
CountArray = NDArray[np.int64]
ReplicaArray = NDArray[np.uint8]
SpeedArray = NDArray[np.float64]

MAX_COPIES = 255
"""Largest number of copies of one expert on one device that a plan can say."""

MAX_LOAD = 2.0**53
"""Largest load of one expert, in tokens: beyond it a float no longer counts exactly."""


def checked_load(load_E: NDArray[np.generic], *, layer: int) -> LoadArray:
    """Validate expert loads.

    Args:
        load_E: Tokens per logical expert [E], any real dtype.
        layer: MoE layer, for the message.

    Returns:
        The loads as float64 [E].

    Raises:
        PlanError: Wrong dimension, or a value that is NaN, infinite, negative or too large; the
            message names layer and expert.
    """
    if load_E.ndim != 1 or load_E.size == 0:
        raise PlanError(f"layer {layer}: loads have shape {load_E.shape}, expected [experts]")
    load = load_E.astype(np.float64, copy=False)
    good = (load >= 0) & (load <= MAX_LOAD)
    if not good.all():
        expert = int(np.argmin(good))
        raise PlanError(
            f"layer {layer}, expert {expert}: load {load[expert]} is not a token count; "
            f"loads are finite, not negative and at most 2^53"
        )
    return load


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """All that a planner may look at.

    Args:
        step: Iteration the plan is for.
        layer: MoE layer.
        load_E: Expected tokens per logical expert, float64 [E].
        previous_ED: The layer's plan in force with its numbers of copies, uint8 [E, D]; all zero
            before the first.
        alive_ED: Replicas that are warm now (kept alive ones included), uint8 [E, D].
        capacity_D: Replicas of this layer that each device may hold, int64 [D].
        expected_error: Share of the tokens that whoever expects the load expects to have
            misplaced, 0 to 1; None where that is not known.
        speed_D: Relative speed that each device has shown of late, float64 [D], beyond what is
            known beforehand: below 1 for one that has become slow; None where all are equal.
    """

    step: int
    layer: int
    load_E: LoadArray
    previous_ED: ReplicaArray
    alive_ED: ReplicaArray
    capacity_D: CountArray
    expected_error: float | None = None
    speed_D: SpeedArray | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.load_E)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.capacity_D)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Replicas of one layer.

    Args:
        step: Iteration the plan was made for.
        layer: MoE layer.
        replicas_ED: Copies of expert e that device d should have, uint8 [E, D]: 1 for a replica,
            more where a planner spends several slots of the device on the expert. A function is
            loaded once whatever the number; see ``core.copies`` for what copies mean.
        load_E: The expected load it was made for [E]; also the priority of its loads.
        release: Whether replicas that it no longer contains leave their devices as soon as their
            expert is warm elsewhere, instead of staying until their keep-alive ends.
        steps: For how many steps, from ``step`` on, it is in force without being looked at again;
            a plan that has anything to load is looked at again in the next step all the same.
    """

    step: int
    layer: int
    replicas_ED: ReplicaArray
    load_E: LoadArray
    release: bool = False
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """What a plan changes. Replicas are function instances here, however many copies one has.

    Args:
        layer: MoE layer.
        start: (expert, device) pairs to make warm, most loaded expert first.
        retire: (expert, device) pairs no longer planned; they may stay warm for a while.
        kept: Number of planned replicas that were warm already.
    """

    layer: int
    start: tuple[tuple[int, int], ...] = field(default=())
    retire: tuple[tuple[int, int], ...] = field(default=())
    kept: int = 0


def diff_plan(plan: Plan, *, previous_ED: ReplicaArray, warm_ED: ReplicaArray) -> PlanDiff:
    """Compare a plan with the one in force and with what is warm.

    Args:
        plan: The new plan.
        previous_ED: The layer's plan in force [E, D].
        warm_ED: Replicas that are warm or loading now [E, D].
    """
    wanted = plan.replicas_ED.astype(bool)
    missing = np.argwhere(wanted & ~warm_ED.astype(bool))
    order = np.argsort(-plan.load_E[missing[:, 0]], kind="stable")
    retired = np.argwhere(previous_ED.astype(bool) & ~wanted)
    return PlanDiff(
        layer=plan.layer,
        start=tuple((int(e), int(d)) for e, d in missing[order]),
        retire=tuple((int(e), int(d)) for e, d in retired),
        kept=int((wanted & warm_ED.astype(bool)).sum()),
    )
