"""Changes of replica sets, judged by what the splitter makes of recent loads.

Drives the compiled search (``kernels.replica_search``): single changes while they pay, new
beginnings from random sets, and the trade of balance against memory. This module must not know
layers, steps or plans: see ``moeless`` for when it is asked.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray, ReplicaArray
from moeless.policies.kernels.replica_search import best_change, cheapest_drop
from moeless.policies.kernels.set_judge import TAIL_WEIGHT, set_penalty
from moeless.policies.planners.topology import random_topology, rename_devices

_RESTARTS = 4
"""Random sets that a new beginning tries."""

_MOST_RESTARTED = 256
"""Experts x devices beyond which that would take too long."""

_LARGE = 32_768
"""Experts x devices beyond which searches are short, so that they stay below a second or so."""

_MOST_CHANGES = 200
_MOST_CHANGES_LARGE = 16
"""Changes of one thorough search."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a layer's replica set, and why.

    Args:
        dropped: (expert, device), or None.
        added: (expert, device), or None.
        gain: Fall of the penalty (relative time beyond the lower bound) that it promised.
        price: What it had to exceed.
    """

    dropped: tuple[int, int] | None
    added: tuple[int, int] | None
    gain: float
    price: float

    def __str__(self) -> str:
        moves = []
        if self.dropped:
            moves.append(f"expert {self.dropped[0]} left device {self.dropped[1]}")
        if self.added:
            moves.append(f"expert {self.added[0]} joined device {self.added[1]}")
        return (
            f"{', '.join(moves)}, gain {self.gain:.2%} of a layer's time per step, "
            f"price {self.price:.2%}"
        )


class SetSearch:
    """Improves replica sets in place.

    Args:
        cost: What experts and tokens cost.
    """

    def __init__(self, cost: LayerCost) -> None:
        self._cost = cost
        self._known_XD = np.zeros((3, 0))

    def _price_XD(self, replicas_ED: ReplicaArray, scale: float = 1.0) -> NDArray[np.float64]:
        """What devices take where loads have been scaled up."""
        devices = replicas_ED.shape[1]
        if self._known_XD.shape[1] != devices:
            self._known_XD = self._cost.price_XD(devices)
        if scale == 1.0 or not self._known_XD[:2].any():
            return self._known_XD
        price_XD = self._known_XD.copy()
        price_XD[:2] *= scale
        return price_XD

    def mean_excess(
        self, load_NE: CountArray, replicas_ED: ReplicaArray, *, scale: float = 1.0
    ) -> float:
        """Mean time of the slowest device beyond the lower bound, relative to it.

        Args:
            load_NE: Loads, int64 [N, E].
            replicas_ED: The set, uint8 [E, D].
            scale: By how much the loads have been scaled up.
        """
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
        price_XD = self._price_XD(replicas_ED, scale)
        return float(set_penalty(load_NE, weight_N, replicas_ED, price_XD, 0.0, np.inf))

    def settle(
        self,
        load_NE: CountArray,
        replicas_ED: ReplicaArray,
        capacity_D: CountArray,
        max_replicas: int,
        *,
        price: float,
        scale: float = 1.0,
        most: int | None = None,
    ) -> list[Change]:
        """Change a set while a change gains more than its price.

        Args:
            load_NE: Loads, int64 [N, E]; their first quarter should stand for the rest.
            replicas_ED: The set, uint8 [E, D].
            capacity_D: Replicas that each device may hold, int64 [D].
            max_replicas: Replicas in all.
            price: What the penalty must fall by for each load.
            scale: By how much the loads have been scaled up.
            most: Changes to make at most; None makes as many as a thorough search does.
        """
        if most is None:
            most = _MOST_CHANGES if replicas_ED.size <= _LARGE else _MOST_CHANGES_LARGE
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
        price_XD = self._price_XD(replicas_ED, scale)
        found = np.empty((2, 4), dtype=np.int64)
        changes: list[Change] = []
        for _ in range(most):
            gain = best_change(
                load_NE,
                weight_N,
                replicas_ED,
                price_XD,
                price,
                capacity_D,
                max_replicas,
                *_breadth(replicas_ED),
                found,
            )
            if gain <= 0.0:
                break
            rows = [row for row in found.tolist() if row[2] >= 0]
            for e0, d0, _, _ in rows:
                if e0 >= 0:
                    replicas_ED[e0, d0] = 0
            for e0, d0, e1, d1 in rows:
                replicas_ED[e1, d1] = 1
                dropped = (e0, d0) if e0 >= 0 else None
                changes.append(
                    Change(
                        dropped=dropped,
                        added=(e1, d1),
                        gain=gain / len(rows) + price,
                        price=price,
                    )
                )
        return changes

    def begin_anew(
        self,
        load_NE: CountArray,
        replicas_ED: ReplicaArray,
        capacity_D: CountArray,
        *,
        price: float,
        seed: int,
    ) -> list[Change]:
        """Begin from random sets of the same size; take the best one if it pays for its loads.

        Args:
            load_NE: Loads, int64 [N, E]; their first quarter should stand for the rest.
            replicas_ED: The set, uint8 [E, D].
            capacity_D: Replicas that each device may hold, int64 [D].
            price: What the penalty must fall by for each load.
            seed: Of the random sets.
        """
        experts, devices = replicas_ED.shape
        held = int(replicas_ED.sum())
        if experts * devices > _MOST_RESTARTED:
            return []
        if self._cost.touch_s == 0 and held >= experts + devices:
            return []  # sets that can be connected are good wherever they begin
        sample_NE = load_NE[: max(16, len(load_NE) // 4)]
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
        best_ED = replicas_ED.copy()
        price_XD = self._price_XD(replicas_ED)
        now = float(set_penalty(load_NE, weight_N, best_ED, price_XD, TAIL_WEIGHT, np.inf))
        best = now
        capacity = capacity_D.tolist()
        kinds = list(zip(capacity, *price_XD.tolist(), strict=True))
        for start in range(_RESTARTS):
            rng = np.random.default_rng((seed, start))
            trial_ED = random_topology(experts, capacity, held, rng)
            self.settle(sample_NE, trial_ED, capacity_D, held, price=1e-3, most=40)
            trial_ED = rename_devices(trial_ED, replicas_ED, kinds)
            loads = int(((trial_ED > 0) & (replicas_ED == 0)).sum())
            penalty = float(set_penalty(load_NE, weight_N, trial_ED, price_XD, TAIL_WEIGHT, best))
            if penalty + price * loads < best:
                best, best_ED = penalty + price * loads, trial_ED
        left = [(e, d) for e, d in np.argwhere((replicas_ED > 0) & (best_ED == 0)).tolist()]
        joined = [(e, d) for e, d in np.argwhere((best_ED > 0) & (replicas_ED == 0)).tolist()]
        replicas_ED[:] = best_ED
        return [
            Change(
                dropped=dropped,
                added=added,
                gain=(now - best) / len(joined) + price,
                price=price,
            )
            for dropped, added in zip(left, joined, strict=True)
        ]

    def trade(
        self,
        load_NE: CountArray,
        replicas_ED: ReplicaArray,
        capacity_D: CountArray,
        max_replicas: int,
        *,
        price: float,
        allowed: tuple[float, float],
    ) -> list[Change]:
        """Trade balance against memory, one replica at a time.

        Args:
            load_NE: Loads, int64 [N, E]; their first quarter should stand for the rest.
            replicas_ED: The set, uint8 [E, D].
            capacity_D: Replicas that each device may hold, int64 [D].
            max_replicas: Replicas in all.
            price: What the penalty must fall by for each load.
            allowed: Mean excess up to which a replica may be given up, and beyond which one is
                added.
        """
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
        now = self.mean_excess(load_NE, replicas_ED)
        held = int(replicas_ED.sum())
        if now > allowed[1]:
            room = min(held + 1, max_replicas)
            return self.settle(load_NE, replicas_ED, capacity_D, room, price=price, most=1)
        drop = np.empty(2, dtype=np.int64)
        after = cheapest_drop(
            load_NE, weight_N, replicas_ED, self._price_XD(replicas_ED), allowed[0], drop
        )
        if drop[0] < 0:
            return self.settle(load_NE, replicas_ED, capacity_D, held, price=price, most=1)
        expert, device = drop.tolist()
        replicas_ED[expert, device] = 0
        return [Change(dropped=(expert, device), added=None, gain=now - after, price=0.0)]


def _breadth(replicas_ED: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Links, drops and exchanges to try: the most promising, fewer of them in large sets."""
    if replicas_ED.size <= 256:
        return 24, 10, 48
    return (12, 6, 12) if replicas_ED.size <= _LARGE else (6, 4, 4)


def thinning(replicas_ED: NDArray[np.uint8]) -> int:
    """Every how manieth of the recent loads to judge by, so that a search does not take long.

    Args:
        replicas_ED: The set, uint8 [E, D].
    """
    size = replicas_ED.size
    return 1 if size <= 256 else 2 if size <= _LARGE else 8
