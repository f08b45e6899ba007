"""The default planner: a well-connected standing set of replicas, changed seldom and at a price.

The plan decides only which replicas exist; token shares are decided when the gate has spoken, by
the splitter. So replicas are chosen together, for what they make possible: the splitter's own
algorithm is run over recent loads, and a change is made when it lowers the time of the layer by
more than the price of a move (``set_search``). The search runs beside the token path; a plan
is the newest set that it found.
"""

import math
from collections.abc import Callable
from typing import Self

import numpy as np

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import (
    CountArray,
    LoadArray,
    Plan,
    PlanRequest,
    SpeedArray,
    checked_load,
)
from moeless.errors import ConfigError
from moeless.policies.planners.feasibility import checked_capacity
from moeless.policies.planners.layer_search import Found, Known, LayerSearch
from moeless.policies.planners.layer_state import EARLY_STEPS, LayerState
from moeless.policies.planners.set_search import SetSearch, thinning
from moeless.policies.planners.topology import carry_over, first_topology

_RESTART_INTERVAL = 500
"""Steps between two attempts to find a wholly different set."""

_PAYBACK_STEPS = 200
_PAYBACK_STEPS_TOUCHING = 400
"""See ``payback_steps``."""


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
            replica while the other one loads. None takes 200, or 400 where touching an expert
            costs time: there a better set gains less, but for longer.

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
        payback_steps: int | None = None,
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
        cost = cost or LayerCost(token_s=1.0)
        if payback_steps is None:
            payback_steps = _PAYBACK_STEPS_TOUCHING if cost.touch_s > 0 else _PAYBACK_STEPS
        if min(window, interval, max_interval, payback_steps) < 1 or not tolerance >= 0:
            raise ConfigError("planner moeless: window, intervals and payback are at least 1")
        self._cost = cost
        self._sets: tuple[bytes | None, SetSearch] = (None, SetSearch(cost))
        self._auto = memory_factor is None
        self._memory_factor = max_memory_factor if memory_factor is None else memory_factor
        self._window = window
        self._interval = interval
        self._max_interval = max(interval, max_interval)
        self._search = LayerSearch(
            trades=self._auto, tolerance=tolerance, price=1.0 / payback_steps
        )
        self._layers: dict[int, LayerState] = {}
        self._inherited: dict[int, LayerState] = {}

    def inherit(self, earlier: Self) -> None:
        """Take over the loads that another planner has observed for other devices."""
        self._inherited = earlier._inherited | earlier._layers

    def _sets_for(self, speed_D: SpeedArray | None) -> tuple[bytes | None, SetSearch]:
        """What searches sets for devices of some speeds; the newest one is kept."""
        key = None if speed_D is None else speed_D.tobytes()
        if self._sets[0] != key:
            cost = self._cost if speed_D is None else self._cost.slowed_by(speed_D)
            self._sets = (key, SetSearch(cost))
        return self._sets

    # The plan: never more than looking up what the search has found

    def plan(self, request: PlanRequest) -> Plan:
        """The layer's replica set.

        The first plan of a layer, and the first after its capacities changed, chooses a set for
        the expected load, close to the plan in force if there is one; later ones return what the
        search has found since. Other speeds of devices have the next search settle the set anew.

        Raises:
            PlanError: A load is not a token count, or the devices cannot hold one replica of
                each expert.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        state = self._layers.get(request.layer)
        if state is None or state.capacity != tuple(request.capacity_D.tolist()):
            state = self._begin(request, load_E)
        speeds, sets = self._sets_for(request.speed_D)
        if state.speeds != speeds:
            state.speeds, state.sets = speeds, sets
            state.pause, state.searches = self._interval, 0
            state.is_unsettled = True
        state.forecast = (request.step, load_E, request.expected_error)
        self._watch(state, load_E, state.believed_error(request.expected_error))
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=state.replicas_ED,
            load_E=load_E,
            release=True,
        )

    def _begin(self, request: PlanRequest, load_E: LoadArray) -> LayerState:
        slots = checked_capacity(request)
        experts = request.num_experts
        # The small addend keeps 1.15 x 20 (22.999... in binary) at 23.
        wanted = math.floor(self._memory_factor * experts + 1e-9)
        most = max(experts, min(wanted, sum(slots)))
        # What can just be connected balances most loads; where memory is to be saved, more must
        # first prove its worth.
        connected = experts + sum(slots_d > 0 for slots_d in slots) - 1
        first = min(most, connected) if self._auto else most
        if request.previous_ED.any():
            replicas_ED = carry_over(request.previous_ED, slots, first)
        else:
            replicas_ED = first_topology(experts, slots, first)
        count_E, scale = _as_counts(load_E)
        speeds, sets = self._sets_for(request.speed_D)
        if count_E.any():
            sets.settle(
                count_E[None],
                replicas_ED,
                np.array(slots, dtype=np.int64),
                first,
                price=1e-6,
                scale=scale,
            )
        state = LayerState(
            capacity=tuple(request.capacity_D.tolist()),
            replicas_ED=replicas_ED,
            max_replicas=most,
            window_NE=np.zeros((self._window, experts), dtype=np.int64),
            sets=sets,
            speeds=speeds,
            pause=self._interval,
            next_search=EARLY_STEPS[0],
        )
        known = self._layers.get(request.layer, self._inherited.pop(request.layer, None))
        if known is not None:
            state.know_loads_of(known)
        self._layers[request.layer] = state
        return state

    def _watch(self, state: LayerState, load_E: LoadArray, error: float) -> None:
        """Search soon when a load is expected that the set cannot balance.

        Forecasts are believed but for an error, a share of the tokens.
        """
        if state.next_search <= state.observed + 1 or state.observed < EARLY_STEPS[-1]:
            return
        count_E, scale = _as_counts(load_E)
        excess = state.sets.mean_excess(count_E[None], state.replicas_ED, scale=scale)
        if excess > state.best_excess + 0.25 + 2.0 * error:
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
            stated = state.forecast[2]
            state.forecast_error += (error - state.forecast_error) / 16.0
            state.stated_error += ((error if stated is None else stated) - state.stated_error) / 16
        state.window_NE[state.observed % self._window] = load_E
        state.observed += 1
        state.last_step = step

    def search_due(self, layer: int) -> bool:
        """Whether the layer should be searched, off the token path."""
        state = self._layers.get(layer)
        if state is None:
            return False
        return state.observed >= state.next_search or (state.is_unsettled and state.observed > 0)

    def begin_search(self, layer: int) -> Callable[[], Callable[[], None]]:
        """Note what is known of a layer, to search by.

        Returns:
            The search for a better replica set, which may run in a thread of its own. It returns
            what takes up its result; later plans have it.
        """
        state = self._layers[layer]
        state.searches += 1
        known = Known(
            sets=state.sets,
            load_NE=self._sample(state),
            replicas_ED=state.replicas_ED.copy(),
            capacity_D=np.minimum(state.capacity, len(state.replicas_ED)).astype(np.int64),
            max_replicas=state.max_replicas,
            best_excess=state.best_excess,
            step=state.last_step,
            seed=state.observed,
            early=state.observed <= EARLY_STEPS[-1],
            unsettled=state.is_unsettled,
            begins_anew=state.observed >= state.next_restart,
            looks_up=state.searches % 8 == 0 or state.searches < 8,
        )
        state.is_unsettled = False
        if known.begins_anew:
            state.next_restart = state.observed + _RESTART_INTERVAL

        def search() -> Callable[[], None]:
            found = self._search.run(known)
            return lambda: self._take_up(state, found)

        return search

    def search(self, layer: int) -> None:
        """Search at once, for whoever has no thread to spare."""
        self.begin_search(layer)()()

    def _take_up(self, state: LayerState, found: Found) -> None:
        state.best_excess = found.best_excess
        if found.changes:
            dated = [(found.step, change) for change in found.changes]
            state.changes = [*state.changes, *dated][-64:]
            state.replicas_ED = found.replicas_ED
        self._schedule(state, found=bool(found.changes))

    def _sample(self, state: LayerState) -> CountArray:
        """Recent loads to judge by, the first quarter spread over all of them.

        Where judging takes long it is every second, fourth, ... one.
        """
        known = min(state.observed, self._window)
        late = known > EARLY_STEPS[-1]
        thin = thinning(state.replicas_ED) if late else 1
        recent_NE = state.window_NE[:known:thin]
        order = np.argsort(np.arange(len(recent_NE)) % 4, kind="stable")
        sample_NE: CountArray = recent_NE[order]
        return sample_NE

    def _schedule(self, state: LayerState, *, found: bool) -> None:
        for early in EARLY_STEPS:
            if state.observed < early:
                state.next_search = early
                return
        state.pause = self._interval if found else min(2 * state.pause, self._max_interval)
        state.next_search = state.observed + state.pause

    def stands(self, layer: int) -> bool:
        """Whether searches of the layer have lately found nothing better than its set."""
        state = self._layers.get(layer)
        return (
            state is not None
            and state.observed >= EARLY_STEPS[-1]
            and state.pause > self._interval
            and not state.is_unsettled
        )

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
            f"forecasts miss {state.forecast_error:.1%} of the tokens{state.newest_statement()}",
        ]
        if known:
            loads_NE = state.window_NE[:known]
            excess = state.sets.mean_excess(loads_NE, state.replicas_ED)
            lines.append(f"mean time beyond the lower bound over those steps: {excess:.2%}")
        lines.extend(f"after step {step}: {change}" for step, change in state.changes[-5:])
        lines.append(f"next search after {max(0, state.next_search - state.observed)} more steps")
        return "\n".join(lines)


def _as_counts(load_E: LoadArray) -> tuple[CountArray, float]:
    """Whole tokens, and their scale: small expected loads are scaled up to lose nothing."""
    total = float(load_E.sum())
    scale = 1.0 if total >= 1e5 or total == 0 else 1e6 / total
    counts: CountArray = np.rint(load_E * scale).astype(np.int64)
    return counts, scale
