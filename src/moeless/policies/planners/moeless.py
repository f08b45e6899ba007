"""The default planner: a well-connected standing set of replicas, changed seldom and at a price.

The plan decides only which replicas exist; token shares are decided when the gate has spoken, by
the splitter. So replicas are chosen together, for what they make possible: the splitter's own
algorithm is run over recent loads, and a change is made when it lowers the time of the layer by
more than the price of a move (``replica_search``). The search runs beside the token path; a plan
is the newest set that it found.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import (
    CountArray,
    LoadArray,
    Plan,
    PlanRequest,
    ReplicaArray,
    checked_load,
)
from moeless.errors import ConfigError
from moeless.policies.kernels.replica_search import (
    TAIL_WEIGHT,
    best_change,
    cheapest_drop,
    set_penalty,
)
from moeless.policies.planners.feasibility import checked_capacity
from moeless.policies.planners.topology import (
    carry_over,
    first_topology,
    random_topology,
    rename_devices,
)

_EARLY_STEPS = (4, 8, 16, 32)
"""Steps after which a layer is searched thoroughly: little was known before."""

_RESTARTS = 4
_RESTART_INTERVAL = 500
"""Steps between two attempts to find a wholly different set, and random sets to begin from."""

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
        step: Iteration whose load was the last that it was based on.
        dropped: (expert, device), or None.
        added: (expert, device), or None.
        gain: Fall of the penalty (relative time beyond the lower bound) that it promised.
        price: What it had to exceed.
    """

    step: int
    dropped: tuple[int, int] | None
    added: tuple[int, int] | None
    gain: float
    price: float


@dataclass(kw_only=True)
class _LayerState:
    capacity: tuple[int, ...]
    replicas_ED: ReplicaArray
    max_replicas: int
    window_NE: CountArray
    observed: int = 0
    last_step: int = 0
    next_search: int = 0
    next_restart: int = _EARLY_STEPS[-1]
    pause: int = 0
    searching: bool = False
    searches: int = 0
    best_excess: float = 0.0
    forecast_error: float = 0.0
    forecast: tuple[int, LoadArray] | None = None
    changes: list[Change] = field(default_factory=list)


class MoelessPlanner:
    """Chooses replicas for what the splitter can make of them.

    Args:
        cost: What experts and tokens cost; by default tokens only (the paper's time model).
        memory_factor: Replicas of a layer in all, as a multiple of E. None takes the cheapest
            memory that keeps the mean layer time within ``tolerance`` of the best.
        max_memory_factor: Ceiling where ``memory_factor`` is None.
        tolerance: See there.
        window: Recent steps over which a set is judged.
        interval: Steps between two searches of a layer; doubled up to ``max_interval`` while
            nothing is found.
        max_interval: See there.
        payback_steps: A move must win one layer time within so many steps: its device misses a
            replica while the other one loads.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self,
        cost: LayerCost | None = None,
        *,
        memory_factor: float | None = None,
        max_memory_factor: float = 2.0,
        tolerance: float = 0.02,
        window: int = 64,
        interval: int = 5,
        max_interval: int = 80,
        payback_steps: int = 200,
    ) -> None:
        for name, factor in (
            ("memory_factor", memory_factor),
            ("max_memory_factor", max_memory_factor),
        ):
            if factor is not None and not (math.isfinite(factor) and factor >= 1.0):
                raise ConfigError(
                    f"planner moeless: {name} {factor} is not a finite number of at least 1 "
                    f"(one replica per expert); use for example 2.0"
                )
        if min(window, interval, max_interval, payback_steps) < 1 or not tolerance >= 0:
            raise ConfigError("planner moeless: window, intervals and payback are at least 1")
        cost = cost or LayerCost(token_s=1.0)
        self._touch = cost.touch_s / (cost.token_s + 2 * cost.transfer_s)
        self._auto = memory_factor is None
        self._memory_factor = max_memory_factor if memory_factor is None else memory_factor
        self._tolerance = tolerance
        self._window = window
        self._interval = interval
        self._max_interval = max(interval, max_interval)
        self._price = 1.0 / payback_steps
        self._layers: dict[int, _LayerState] = {}

    # The plan: never more than looking up what the search has found

    def plan(self, request: PlanRequest) -> Plan:
        """The layer's replica set.

        The first plan of a layer, and the first after its capacities changed, chooses a set for
        the expected load, close to the plan in force if there is one; later ones return what the
        search has found since.

        Raises:
            PlanError: A load is not a token count, or the devices cannot hold one replica of
                each expert.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        state = self._layers.get(request.layer)
        if state is None or state.capacity != tuple(request.capacity_D.tolist()):
            state = self._begin(request, load_E)
        state.forecast = (request.step, load_E)
        self._watch(state, load_E)
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=state.replicas_ED,
            load_E=load_E,
            release=True,
        )

    def _begin(self, request: PlanRequest, load_E: LoadArray) -> _LayerState:
        slots = checked_capacity(request)
        experts = request.num_experts
        # The small addend keeps 1.15 x 20 (22.999... in binary) at 23.
        wanted = math.floor(self._memory_factor * experts + 1e-9)
        most = max(experts, min(wanted, sum(slots)))
        if request.previous_ED.any():
            replicas_ED = carry_over(request.previous_ED, slots, most)
        else:
            replicas_ED = first_topology(experts, slots, most)
        count_E, scale = _as_counts(load_E)
        if count_E.any():
            self._settle(
                count_E[None],
                replicas_ED,
                np.array(slots, dtype=np.int64),
                most,
                touch=self._touch * scale,
                price=1e-6,
            )
        state = _LayerState(
            capacity=tuple(request.capacity_D.tolist()),
            replicas_ED=replicas_ED,
            max_replicas=most,
            window_NE=np.zeros((self._window, experts), dtype=np.int64),
            pause=self._interval,
            next_search=_EARLY_STEPS[0],
        )
        known = self._layers.get(request.layer)
        if known is not None and known.window_NE.shape == state.window_NE.shape:
            state.window_NE, state.observed = known.window_NE, known.observed
            state.next_search = known.observed + 1
        self._layers[request.layer] = state
        return state

    def _watch(self, state: _LayerState, load_E: LoadArray) -> None:
        """Search soon when a load is expected that the set cannot balance.

        Forecasts are believed as far as the last ones came true.
        """
        if state.next_search <= state.observed + 1 or state.observed < _EARLY_STEPS[-1]:
            return
        count_E, scale = _as_counts(load_E)
        excess = set_penalty(
            count_E[None], np.ones(1), state.replicas_ED, self._touch * scale, 0.0, np.inf
        )
        if excess > state.best_excess + 0.25 + 2.0 * state.forecast_error:
            state.next_search = state.observed + 1
            state.pause = self._interval

    # What came true

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Take a load that came true, tokens [E]."""
        state = self._layers.get(layer)
        if state is None or not load_E.any():
            return
        if state.forecast is not None and state.forecast[0] == step:
            expected_E = state.forecast[1]
            scale = load_E.sum() / max(expected_E.sum(), 1e-9)
            error = float(np.abs(expected_E * scale - load_E).sum() / (2.0 * load_E.sum()))
            state.forecast_error += (error - state.forecast_error) / 16.0
        state.window_NE[state.observed % self._window] = load_E
        state.observed += 1
        state.last_step = step

    def search_due(self, layer: int) -> bool:
        """Whether ``search`` should be called for the layer, off the token path."""
        state = self._layers.get(layer)
        return state is not None and not state.searching and state.observed >= state.next_search

    def search(self, layer: int) -> None:
        """Look for a better replica set; a later plan takes it up.

        Takes milliseconds; releases the GIL; may run in a thread of its own, for one layer at a
        time.
        """
        state = self._layers[layer]
        state.searching = True
        try:
            self._search(state)
        finally:
            state.searching = False

    def _search(self, state: _LayerState) -> None:
        load_NE = self._sample(state)
        replicas_ED = state.replicas_ED.copy()
        slots = [min(c, load_NE.shape[1]) for c in state.capacity]
        capacity_D = np.array(slots, dtype=np.int64)
        early = state.observed <= _EARLY_STEPS[-1]
        state.searches += 1
        changes: list[Change] = []
        if state.observed >= state.next_restart:
            state.next_restart = state.observed + _RESTART_INTERVAL
            changes += self._restart(state, load_NE, replicas_ED, capacity_D)
        if self._auto and not early:
            changes += self._trade(state, load_NE, replicas_ED, capacity_D)
        else:
            changes += self._settle(
                load_NE,
                replicas_ED,
                capacity_D,
                state.max_replicas,
                price=self._price * (0.2 if early else 1.0),
                most=_most_changes(replicas_ED) if early else 1,
            )
        if changes:
            dated = [
                Change(
                    step=state.last_step,
                    dropped=c.dropped,
                    added=c.added,
                    gain=c.gain,
                    price=c.price,
                )
                for c in changes
            ]
            state.changes = [*state.changes, *dated][-64:]
            state.replicas_ED = replicas_ED
        self._schedule(state, found=bool(changes))

    def _sample(self, state: _LayerState) -> CountArray:
        """Recent loads to judge by, the first quarter spread over all of them.

        Where judging takes long it is every second, fourth, ... one.
        """
        known = min(state.observed, self._window)
        thin = _effort(state.replicas_ED)[3] if known > _EARLY_STEPS[-1] else 1
        if self._touch > 0 and known > _EARLY_STEPS[-1]:
            thin *= 2
        recent_NE = state.window_NE[:known:thin]
        order = np.argsort(np.arange(len(recent_NE)) % 4, kind="stable")
        sample_NE: CountArray = recent_NE[order]
        return sample_NE

    def _schedule(self, state: _LayerState, *, found: bool) -> None:
        for early in _EARLY_STEPS:
            if state.observed < early:
                state.next_search = early
                return
        state.pause = self._interval if found else min(2 * state.pause, self._max_interval)
        state.next_search = state.observed + state.pause

    def _restart(
        self,
        state: _LayerState,
        load_NE: CountArray,
        replicas_ED: ReplicaArray,
        capacity_D: CountArray,
    ) -> list[Change]:
        """Begin anew from random sets, in place; take the best one if it pays for its loads."""
        experts, devices = replicas_ED.shape
        held = int(replicas_ED.sum())
        if experts * devices > _MOST_RESTARTED or held >= experts + devices:
            return []  # sets that can be connected are good wherever they begin
        sample_NE = load_NE[: max(16, len(load_NE) // 4)]
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
        price = self._price * (0.2 if state.observed <= _EARLY_STEPS[-1] else 1.0)
        best_ED = replicas_ED.copy()
        now = float(set_penalty(load_NE, weight_N, best_ED, self._touch, TAIL_WEIGHT, np.inf))
        best = now
        capacity = capacity_D.tolist()
        for start in range(_RESTARTS):
            rng = np.random.default_rng((state.observed, start))
            trial_ED = random_topology(experts, capacity, held, rng)
            self._settle(sample_NE, trial_ED, capacity_D, held, price=1e-3, most=40)
            trial_ED = rename_devices(trial_ED, replicas_ED, capacity)
            loads = int(((trial_ED > 0) & (replicas_ED == 0)).sum())
            penalty = float(
                set_penalty(load_NE, weight_N, trial_ED, self._touch, TAIL_WEIGHT, best)
            )
            if penalty + price * loads < best:
                best, best_ED = penalty + price * loads, trial_ED
        left = [(e, d) for e, d in np.argwhere((replicas_ED > 0) & (best_ED == 0)).tolist()]
        joined = [(e, d) for e, d in np.argwhere((best_ED > 0) & (replicas_ED == 0)).tolist()]
        replicas_ED[:] = best_ED
        return [
            Change(
                step=0,
                dropped=dropped,
                added=added,
                gain=(now - best) / len(joined) + price,
                price=price,
            )
            for dropped, added in zip(left, joined, strict=True)
        ]

    def _settle(
        self,
        load_NE: CountArray,
        replicas_ED: ReplicaArray,
        capacity_D: CountArray,
        max_replicas: int,
        *,
        price: float,
        touch: float | None = None,
        most: int = _MOST_CHANGES,
    ) -> list[Change]:
        """Change a set in place while a change gains more than its price."""
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
        found = np.empty((2, 4), dtype=np.int64)
        changes: list[Change] = []
        for _ in range(most):
            gain = best_change(
                load_NE,
                weight_N,
                replicas_ED,
                self._touch if touch is None else touch,
                price,
                capacity_D,
                max_replicas,
                *_effort(replicas_ED)[:3],
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
                        step=0,
                        dropped=dropped,
                        added=(e1, d1),
                        gain=gain / len(rows) + price,
                        price=price,
                    )
                )
        return changes

    def _trade(
        self,
        state: _LayerState,
        load_NE: CountArray,
        replicas_ED: ReplicaArray,
        capacity_D: CountArray,
    ) -> list[Change]:
        """Balance against memory: the fewest replicas whose mean time is within tolerance."""
        weight_N = np.full(len(load_NE), 1.0 / len(load_NE))

        def mean_excess(set_ED: ReplicaArray) -> float:
            return float(set_penalty(load_NE, weight_N, set_ED, self._touch, 0.0, np.inf))

        if state.searches % 8 == 0 or state.searches < 8:
            full_ED = replicas_ED.copy()
            self._settle(load_NE, full_ED, capacity_D, state.max_replicas, price=self._price)
            state.best_excess = mean_excess(full_ED)
        allowed = (1.0 + state.best_excess) * (1.0 + self._tolerance) - 1.0
        now = mean_excess(replicas_ED)
        held = int(replicas_ED.sum())
        if now > allowed:
            room = min(held + 1, state.max_replicas)
            return self._settle(load_NE, replicas_ED, capacity_D, room, price=self._price, most=1)
        drop = np.empty(2, dtype=np.int64)
        margin = (1.0 + state.best_excess) * (1.0 + 0.5 * self._tolerance) - 1.0
        after = cheapest_drop(load_NE, weight_N, replicas_ED, self._touch, margin, drop)
        if drop[0] < 0:
            return self._settle(load_NE, replicas_ED, capacity_D, held, price=self._price, most=1)
        expert, device = drop.tolist()
        replicas_ED[expert, device] = 0
        return [Change(step=0, dropped=(expert, device), added=None, gain=now - after, price=0.0)]

    # Why

    def explain(self, layer: int) -> str:
        """Say in words what the layer's set is based on and what changed last."""
        state = self._layers.get(layer)
        if state is None:
            return f"layer {layer} has no plan yet"
        known = min(state.observed, self._window)
        held = int(state.replicas_ED.sum())
        lines = [
            f"{held} replicas of {len(state.replicas_ED)} experts, at most {state.max_replicas}",
            f"judged over the last {known} of {state.observed} steps; "
            f"forecasts miss {state.forecast_error:.1%} of the tokens",
        ]
        if known:
            weight_N = np.full(known, 1.0 / known)
            loads = state.window_NE[:known]
            excess = set_penalty(loads, weight_N, state.replicas_ED, self._touch, 0.0, np.inf)
            lines.append(f"mean time beyond the lower bound over those steps: {excess:.2%}")
        lines.extend(
            f"after step {change.step}: {_say(change)}, gain {change.gain:.2%} of a layer's time "
            f"per step, price {change.price:.2%}"
            for change in state.changes[-5:]
        )
        lines.append(f"next search after {max(0, state.next_search - state.observed)} more steps")
        return "\n".join(lines)


def _say(change: Change) -> str:
    drop = f"expert {change.dropped[0]} left device {change.dropped[1]}" if change.dropped else ""
    add = f"expert {change.added[0]} joined device {change.added[1]}" if change.added else ""
    return ", ".join(part for part in (drop, add) if part)


def _as_counts(load_E: LoadArray) -> tuple[CountArray, float]:
    """Whole tokens, and their scale: small expected loads are scaled up to lose nothing."""
    total = float(load_E.sum())
    scale = 1.0 if total >= 1e5 or total == 0 else 1e6 / total
    counts: CountArray = np.rint(load_E * scale).astype(np.int64)
    return counts, scale


def _most_changes(replicas_ED: NDArray[np.uint8]) -> int:
    return _MOST_CHANGES if replicas_ED.size <= _LARGE else _MOST_CHANGES_LARGE


def _effort(replicas_ED: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    """How much of a set's neighbourhood is searched: the most promising part, less in large sets.

    Returns:
        Links, drops and exchanges to try, and which fraction of the recent loads to judge by.
    """
    if replicas_ED.size <= 256:
        return 24, 10, 48, 1
    return (12, 6, 12, 2) if replicas_ED.size <= _LARGE else (6, 4, 4, 8)
