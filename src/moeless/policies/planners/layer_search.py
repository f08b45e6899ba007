"""One search for a better replica set of a layer, by what was known when it began.

It changes nothing but what it returns, so it may run beside everything else.
"""

from dataclasses import dataclass

from moeless.core.plan import CountArray, ReplicaArray
from moeless.policies.planners.set_search import Change, SetSearch

_EARLY_PRICE = 0.2
"""Part of the price that a load has to pay back while many steps are still to come."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a layer.

    Args:
        sets: Judges and changes sets.
        load_NE: Recent loads to judge by, int64 [N, E]; their first quarter stands for the rest.
        replicas_ED: The set in use; the search's own.
        capacity_D: Replicas that each device may hold, int64 [D].
        max_replicas: Replicas in all.
        best_excess: Mean excess that all the memory could reach, when it was last looked up.
        step: The step whose load is the newest.
        seed: Of what is chosen at random.
        early: Whether the layer has had so few steps that changes pay for long.
        unsettled: Whether the set was made for devices of other speeds.
        begins_anew: Whether wholly different sets are to be tried.
        looks_up: Whether ``best_excess`` is to be found out again.
    """

    sets: SetSearch
    load_NE: CountArray
    replicas_ED: ReplicaArray
    capacity_D: CountArray
    max_replicas: int
    best_excess: float
    step: int
    seed: int
    early: bool
    unsettled: bool
    begins_anew: bool
    looks_up: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has found.

    Args:
        replicas_ED: A set.
        changes: How it came from the one in use; empty if that is as good.
        best_excess: As in ``Known``.
        step: The same.
    """

    replicas_ED: ReplicaArray
    changes: list[Change]
    best_excess: float
    step: int


class LayerSearch:
    """Searches for replica sets.

    Args:
        trades: Whether memory is saved where it does not pay; else all of it is used.
        tolerance: Part by which the mean layer time may exceed the best then.
        price: What a load has to gain, relative to a layer's time.
    """

    def __init__(self, *, trades: bool, tolerance: float, price: float) -> None:
        self._trades = trades
        self._tolerance = tolerance
        self._price = price

    def run(self, known: Known) -> Found:
        """Search; takes milliseconds and releases the GIL."""
        sets, replicas_ED, load_NE = known.sets, known.replicas_ED, known.load_NE
        price = self._price * (_EARLY_PRICE if known.early else 1.0)
        best_excess = known.best_excess
        changes: list[Change] = []
        if known.begins_anew:
            changes += sets.begin_anew(
                load_NE, replicas_ED, known.capacity_D, price=price, seed=known.seed
            )
        if self._trades and not known.early and not known.unsettled:
            if known.looks_up:
                best_excess = self._best_excess(known)
            changes += sets.trade(
                load_NE,
                replicas_ED,
                known.capacity_D,
                known.max_replicas,
                price=price,
                allowed=self._allowed(best_excess),
            )
        else:
            changes += sets.settle(
                load_NE,
                replicas_ED,
                known.capacity_D,
                int(replicas_ED.sum()) if self._trades else known.max_replicas,
                price=price,
                most=None if known.early or known.unsettled else 1,
            )
        return Found(
            replicas_ED=replicas_ED, changes=changes, best_excess=best_excess, step=known.step
        )

    def _best_excess(self, known: Known) -> float:
        """The best that all the memory could do."""
        full_ED = known.replicas_ED.copy()
        known.sets.settle(
            known.load_NE, full_ED, known.capacity_D, known.max_replicas, price=self._price
        )
        return known.sets.mean_excess(known.load_NE, full_ED)

    def _allowed(self, best_excess: float) -> tuple[float, float]:
        """Mean excess up to which memory is saved, and beyond which it is spent."""
        best = 1.0 + best_excess
        half = best * (1.0 + 0.5 * self._tolerance) - 1.0
        return half, best * (1.0 + self._tolerance) - 1.0
