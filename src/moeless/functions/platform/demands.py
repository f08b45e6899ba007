"""Demands: tokens that wait until functions are warm somewhere, and the search for a place.

Each engine has at most one open demand. They stand in one line, whatever their model: the oldest
is served first, and nothing that it needs is kept from it by younger ones.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moeless.core.memory_share import MemoryShare
from moeless.core.model import FunctionId, ModelSpec
from moeless.core.plan import LoadArray
from moeless.functions.links.board import ModelBoard
from moeless.functions.platform.waking import Waking
from moeless.functions.pool.lifecycle import State
from moeless.functions.pool.pool import DevicePool
from moeless.functions.sharing.activity import Activity
from moeless.functions.sharing.shares import Shares


@dataclass(kw_only=True)
class Demand:
    """Tokens wait until every one of these functions is warm somewhere."""

    engine: int
    ticket: int
    place: int
    """In the line of all demands."""
    layer: int
    opened_s: float
    missing: set[FunctionId]
    failures: dict[FunctionId, dict[int, str]] = field(default_factory=dict)
    """Why loads failed, per device that tried."""
    hopeless: set[FunctionId] = field(default_factory=set)
    """Those of them that no other device can load either."""


@dataclass(frozen=True, kw_only=True)
class DemandResult:
    """The end of a demand.

    Args:
        ticket: Which demand of its engine.
        error: None when all functions became warm, else the reason why one cannot.
        engine: Whose demand.
    """

    ticket: int
    error: str | None = None
    engine: int = 0


class DemandingModel(Protocol):
    """A model whose tokens wait."""

    spec: ModelSpec
    function_bytes: int
    board: ModelBoard
    share: MemoryShare
    activity: Activity
    demands: dict[int, Demand]
    """By engine."""
    barred: dict[int, str]
    wakes: bool
    seen_LE: LoadArray

    def function(self, layer: int, expert: int) -> FunctionId:
        """The id of one of the model's functions."""
        ...

    def is_busy(self) -> bool:
        """Whether it has requests now."""
        ...

    def running_layers(self) -> Mapping[int, int]:
        """The layer whose gate spoke last in each engine, by engine; -1 between steps."""
        ...


class DemandDesk:
    """Sees to it that what tokens wait for is on its way somewhere, and tells when a wait ends.

    Args:
        models: By id; kept up to date by the owner.
        pools: One per device; kept up to date by the owner.
        returning: Devices whose next host is on its way; kept up to date by the owner.
        shares: Compares models.
    """

    def __init__(
        self,
        models: Mapping[str, DemandingModel],
        pools: Sequence[DevicePool],
        *,
        returning: Collection[int],
        shares: Shares,
    ) -> None:
        self._models = models
        self._shares = shares
        self._pools = pools
        self._returning = returning
        self._waking = Waking(pools)
        self._places = itertools.count(1)
        self._finished: list[DemandResult] = []

    def open(
        self,
        model: DemandingModel,
        *,
        engine: int,
        ticket: int,
        layer: int,
        experts: Sequence[int],
        now_s: float,
    ) -> None:
        """Note a demand; an engine waits for one before it makes the next, so its older one ends.

        Args:
            model: The engine's model.
            engine: Whose tokens wait.
            ticket: The engine's own number for it.
            layer: Of the experts.
            experts: Which ones are needed.
            now_s: The time.
        """
        older = model.demands.get(engine)
        if older is not None:
            self._end(model, older, error="given up for a newer demand")
        functions = {model.function(layer, expert) for expert in experts}
        model.demands[engine] = Demand(
            engine=engine,
            ticket=ticket,
            place=next(self._places),
            layer=layer,
            opened_s=now_s,
            missing={f for f in functions if not model.board.warm_LED[layer, f.expert].any()},
        )
        self._waking.wake(model, engine=engine, layer=layer, num_experts=len(functions))

    def drop(self, model: DemandingModel, engine: int) -> None:
        """An engine is gone: nobody waits for its demand, nor for the end of it."""
        self._waking.forget(model, engine)
        demand = model.demands.pop(engine, None)
        if demand is not None:
            self._withdraw(model, demand)
        self._finished = [result for result in self._finished if result.engine != engine]

    def place_of_engine(self, model: str, engine: int) -> int | None:
        """Place in the line of those that wait, lower is older; None for one that computes."""
        demand = self._models[model].demands.get(engine)
        return None if demand is None else demand.place

    def place_of_function(self, function: FunctionId) -> int:
        """Place of the oldest engine that waits for a function; beyond all others if none does."""
        demands = self._models[function.model].demands.values()
        places = [demand.place for demand in demands if function in demand.missing]
        return min(places, default=sys.maxsize)

    def finished(self) -> list[DemandResult]:
        """Demands that have ended since the last call."""
        done, self._finished = self._finished, []
        return done

    def note_loaded(self, model: DemandingModel, function: FunctionId) -> None:
        """A function has become warm."""
        for demand in model.demands.values():
            demand.missing.discard(function)

    def note_failed(
        self,
        model: DemandingModel,
        function: FunctionId,
        device: int,
        *,
        reason: str,
        elsewhere: bool,
        began_s: float,
    ) -> None:
        """A function's load has failed on a device; elsewhere it may go better, or not.

        What a load saw that began before a demand may have been mended since: it is repeated.
        """
        for demand in model.demands.values():
            if function in demand.missing and began_s >= demand.opened_s:
                demand.failures.setdefault(function, {})[device] = reason
                if not elsewhere:
                    demand.hopeless.add(function)

    def note_host(self, device: int) -> None:
        """A device has a new host, which may load what the one before it could not."""
        for model in self._models.values():
            for demand in model.demands.values():
                for failed in demand.failures.values():
                    failed.pop(device, None)

    def pursue(self, model: DemandingModel) -> None:
        """See to it that each missing function is on its way somewhere; note demands' ends.

        Called after everything that happens: a device that had room may have lost it since.
        """
        self._waking.drop_passed(model)
        for demand in list(model.demands.values()):
            self._pursue(model, demand)

    def _pursue(self, model: DemandingModel, demand: Demand) -> None:
        if not demand.missing:
            self._end(model, demand)
            return
        free_D = self._free_slots(model, demand.layer)
        for function in sorted(demand.missing):
            loading = (p for p in self._pools if p.state(function) is State.LOADING)
            pool = next(loading, None)
            if pool is None:
                pool = self._choose_pool(model, function, demand, free_D)
                reasons = list(demand.failures.get(function, {}).values())
                waits = function not in demand.hopeless and self._is_one_returning(model)
                if pool is None and waits:
                    continue
                if pool is not None and reasons and free_D[pool.device] <= 0 and waits:
                    continue  # nobody has room: the one that returns may
                reasons = reasons or list(model.barred.values())
                if pool is None or (reasons and free_D[pool.device] <= 0):
                    reason = reasons[0] if reasons else "no device is up that could hold it"
                    where = f"layer {function.layer}, expert {function.expert}"
                    self._end(model, demand, error=f"{where}: {reason}")
                    return
                free_D[pool.device] -= 1
            for other in self._pools:
                if other is not pool:
                    other.unwant(function, blocking=True)
            pool.want(function, num_bytes=model.function_bytes, blocking=True)

    def _end(self, model: DemandingModel, demand: Demand, *, error: str | None = None) -> None:
        result = DemandResult(ticket=demand.ticket, error=error, engine=demand.engine)
        self._finished.append(result)
        del model.demands[demand.engine]
        self._withdraw(model, demand)

    def _withdraw(self, model: DemandingModel, demand: Demand) -> None:
        """Take back the wishes of a demand that has ended; what others wait for stays wanted."""
        others = [other.missing for other in model.demands.values()]
        for function in demand.missing.difference(*others):
            for pool in self._pools:
                pool.unwant(function, blocking=True)

    def _free_slots(self, model: DemandingModel, layer: int) -> list[int]:
        """Instances that tokens of a layer may wait for on each device [D].

        That is all room but what the layer's own experts need: those that load, and last copies.
        As long as the devices hold a layer's experts between them, there is enough for all.
        """
        only_E = model.board.warm_LED[layer].sum(axis=1) <= 1
        return [
            self._shares.available_slots(model, pool.device)
            - sum(
                i.state is State.LOADING
                or (i.state is not State.DRAINING and bool(only_E[i.function.expert]))
                for i in pool.instances()
                if i.function.layer == layer and i.function.model == model.spec.model_id
            )
            for pool in self._pools
        ]

    def _is_one_returning(self, model: DemandingModel) -> bool:
        """Whether a device is on its way that holds instances of a model."""
        return any(
            self._pools[device].budget_bytes >= model.function_bytes for device in self._returning
        )

    def _choose_pool(
        self, model: DemandingModel, function: FunctionId, demand: Demand, free_D: list[int]
    ) -> DevicePool | None:
        """Where to load a function that tokens wait for.

        Only where its load has not failed; of those a device with room, if possible the one
        chosen before, then the planned one, then the one with most room.
        """
        planned_D = model.board.planned_LED[function.layer, function.expert]

        def rank(pool: DevicePool) -> tuple[bool, bool, bool, int, int]:
            free = free_D[pool.device]
            planned = bool(planned_D[pool.device])
            return (free <= 0, not pool.wants(function), not planned, -free, pool.device)

        failed = demand.failures.get(function, {})
        able = [
            pool
            for pool in self._pools
            if model.board.device_up_D[pool.device]
            and pool.device not in failed
            and pool.budget_bytes >= model.function_bytes
        ]
        return min(able, key=rank, default=None)
