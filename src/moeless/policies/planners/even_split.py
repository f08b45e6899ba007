"""A planner for engines that divide an expert's tokens evenly over its replicas.

SGLang, vLLM and TensorRT-LLM do. Which counts and seats are best then depends on the exact
loads, so this is a planner for placements made once from recorded loads, not for every step.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import LoadArray, Plan, PlanRequest, ReplicaArray, checked_load
from moeless.errors import ConfigError
from moeless.policies.kernels.even_search import relieve_even
from moeless.policies.planners.feasibility import checked_capacity
from moeless.policies.planners.topology import carry_over

_LEVELS = (
    2.0,
    1.5,
    1.3,
    1.2,
    1.14,
    1.1,
    1.06,
    1.03,
    1.0,
    0.97,
    0.94,
    0.9,
    0.85,
    0.8,
    0.7,
    0.6,
    0.5,
)
"""Largest share of an expert to begin with, in mean device loads."""

_LARGE = 4096
"""Experts x devices from which only every third set is tried."""


class EvenSplitPlanner:
    """Chooses counts and seats for the least highest device load under an even split.

    Several sets, with as many replicas as keep every share below some level or with more and more
    of them for the largest shares, are seated from the largest share down and improved by a local
    search; the best one is the plan. No
    expert has two replicas on a device, and replicas that gain nothing are not made.

    Args:
        memory_factor: Replicas of a layer in all, as a multiple of E.
        cost: Says how fast devices are; by default all are equal.

    Raises:
        ConfigError: The factor is out of range.
    """

    def __init__(self, memory_factor: float = 2.0, *, cost: LayerCost | None = None) -> None:
        if not (math.isfinite(memory_factor) and memory_factor >= 1.0):
            raise ConfigError(
                f"planner even_split: memory_factor {memory_factor} is not a finite number of at "
                f"least 1 (one replica per expert); use for example 2.0"
            )
        self._memory_factor = memory_factor
        self._cost = cost or LayerCost(token_s=1.0)

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas.

        Raises:
            PlanError: A load is not a token count, or the devices cannot hold one replica of
                each expert.
        """
        # A copy: predictors hand out arrays that are read-only, which compiled loops do not take.
        load_E = checked_load(request.load_E, layer=request.layer).copy()
        capacity = checked_capacity(request)
        experts = request.num_experts
        wanted = math.floor(self._memory_factor * experts + 1e-9)
        most = max(experts, min(wanted, sum(capacity)))
        best_ED: ReplicaArray | None = None
        best = np.inf
        speed_D = self._cost.speed_D(request.num_devices)
        if request.speed_D is not None:
            speed_D = speed_D * request.speed_D
        for start_ED in self._starts(load_E, capacity, most, request.previous_ED, speed_D):
            highest = float(
                relieve_even(load_E, start_ED, speed_D, np.array(capacity, dtype=np.int64), most)
            )
            if highest < best * (1.0 - 1e-9):
                best, best_ED = highest, start_ED
        assert best_ED is not None
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=best_ED,
            load_E=load_E,
            release=True,
        )

    def _starts(
        self,
        load_E: LoadArray,
        capacity: Sequence[int],
        most: int,
        previous_ED: ReplicaArray,
        speed_D: NDArray[np.float64],
    ) -> Iterator[ReplicaArray]:
        experts = len(load_E)
        if previous_ED.any():
            yield carry_over(previous_ED, capacity, experts)
        yield seat_shares(load_E, np.ones(experts, dtype=np.int64), capacity, speed_D)
        mean = float(load_E.sum()) / len(capacity)
        usable = sum(slots > 0 for slots in capacity)
        sparse = 3 if len(load_E) * len(capacity) > _LARGE else 1
        for level in _LEVELS[::sparse] if mean > 0 else ():
            copies_E = np.clip(np.ceil(load_E / (level * mean) - 1e-9), 1, usable)
            if copies_E.sum() <= most:
                yield seat_shares(load_E, copies_E.astype(np.int64), capacity, speed_D)
        greedy_E = np.ones(experts, dtype=np.int64)
        for held in range(experts + 1, most + 1 if mean > 0 else 0):
            shares = np.where(greedy_E < usable, load_E / greedy_E, -1.0)
            greedy_E[int(np.argmax(shares))] += 1
            if (most - held) % max(1, sparse * (most - experts) // 8) == 0:
                yield seat_shares(load_E, np.minimum(greedy_E, usable), capacity, speed_D)


def seat_shares(
    load_E: LoadArray,
    copies_E: np.ndarray,
    capacity: Sequence[int],
    speed_D: NDArray[np.float64],
) -> ReplicaArray:
    """Seat replicas from the largest share down, each on the emptiest device that may take it.

    Args:
        load_E: Tokens per expert [E].
        copies_E: Replicas that each expert should have [E], at least 1.
        capacity: Replicas that each device may hold [D]; the sum is at least E.
        speed_D: Relative speed of each device [D]; how full one is is its load over it.

    Returns:
        uint8 [E, D]; every expert has a replica, further ones where there was room.
    """
    replicas_ED = np.zeros((len(load_E), len(capacity)), dtype=np.uint8)
    free = list(capacity)
    device_load = [0.0] * len(capacity)
    spare = sum(capacity) - len(load_E)
    shares = load_E / copies_E
    for expert in sorted(range(len(load_E)), key=lambda e: (-shares[e], e)):
        wanted = 1 + min(int(copies_E[expert]) - 1, max(0, spare))
        order = sorted(
            (d for d in range(len(capacity)) if free[d] > 0),
            key=lambda d: (device_load[d], -free[d], d),
        )
        for device in order[:wanted]:
            replicas_ED[expert, device] = 1
            free[device] -= 1
            device_load[device] += float(shares[expert] / speed_D[device])
        spare -= min(wanted, len(order)) - 1
    return replicas_ED
