"""Which load comes first and which instance goes first: what its layer's next turn says.

It must not know torch, sockets or processes.
"""

from collections.abc import Mapping
from typing import Protocol

from moeless.core.model import FunctionId, ModelSpec
from moeless.functions.links.board import ModelBoard
from moeless.functions.pool.lifecycle import Instance
from moeless.functions.sharing.activity import Activity
from moeless.functions.sharing.shares import Shares, Turn

_STUCK_S = 10.0
"""An engine that has been in one layer for so long, without waiting for loads, keeps nothing from
those that wait: it may be stopped. One that is only slow has what it misses loaded again."""


class RunningModel(Protocol):
    """A model whose layers take turns, in one engine or in several."""

    spec: ModelSpec
    board: ModelBoard
    activity: Activity

    def running_layers(self) -> Mapping[int, int]:
        """The layer whose gate spoke last in each engine, by engine; -1 between steps."""
        ...

    def is_running(self, layer: int) -> bool:
        """Whether some engine computes the layer now."""
        ...

    def last_used_ns(self, layer: int, expert: int, device: int) -> int:
        """When any engine last used an instance, or it became warm; monotonic clock."""
        ...


class Waiters(Protocol):
    """Knows which engines wait for loads, and since when."""

    def place_of_engine(self, model: str, engine: int) -> int | None:
        """Place in the line of those that wait, lower is older; None for one that computes."""
        ...

    def place_of_function(self, function: FunctionId) -> int:
        """Place of the oldest engine that waits for a function; beyond all others if none does."""
        ...


class NeedOrder:
    """Orders loads and evictions by when a layer runs next. A ``pool.pool_order.PoolOrder``.

    Args:
        models: By id; kept up to date by the owner.
        waiters: Engines that wait for loads.
        shares: Compares models.
    """

    def __init__(
        self, models: Mapping[str, RunningModel], *, waiters: Waiters, shares: Shares
    ) -> None:
        self._models = models
        self._waiters = waiters
        self._shares = shares

    def moment(self) -> object:
        """The layers whose gates spoke last: ``needed_in`` follows from them."""
        return [list(model.running_layers().values()) for model in self._models.values()]

    def needed_in(self, function: FunctionId) -> int:
        """Layers until the function's layer runs next in some engine, from 1 to L.

        The layer whose gate spoke last has had its turn: it counts as L.
        """
        model = self._models[function.model]
        num_layers = model.spec.num_layers
        running = model.running_layers().values() or (-1,)
        return min((function.layer - layer) % num_layers or num_layers for layer in running)

    def waits_since(self, function: FunctionId) -> int:
        """Place of those who wait for the function; lower waits for longer."""
        return self._waiters.place_of_function(function)

    def worth(self, instance: Instance) -> tuple[float, ...]:
        """Unplanned first; then what is needed last; then second copies; then the idlest."""
        model = self._models[instance.function.model]
        layer, expert = instance.function.layer, instance.function.expert
        warm_D = model.board.warm_LED[layer, expert]
        return (
            float(model.board.planned_LED[layer, expert, instance.device] > 0),
            -float(self.needed_in(instance.function)),
            float(warm_D.sum() <= 1),
            float(model.last_used_ns(layer, expert, instance.device)),
        )

    def turn_of(
        self,
        victim: Instance,
        *,
        for_load: FunctionId,
        blocking: bool,
        leaving: Mapping[str, int],
    ) -> int | None:
        """When a victim has to make room for a load, if it has: see ``shares``.

        A layer that an engine is computing keeps one copy of each expert. Engines that wait for
        loads keep theirs from those only that have begun to wait later: whoever waits for longest
        gets what it needs, however little room there is.
        """
        if victim.function.model == for_load.model:
            return self._turn_of_own(victim, for_load, blocking=blocking)
        turn = self._shares.turn_of(victim, for_load=for_load, blocking=blocking, leaving=leaving)
        if turn is None or turn is Turn.ASLEEP or turn is Turn.IDLE:
            return turn  # nobody computes with it
        model = self._models[victim.function.model]
        if not model.is_running(victim.function.layer):
            return turn
        if blocking and not (self._is_only_copy(victim) and self._is_kept(victim, for_load)):
            return turn
        return None

    def _turn_of_own(
        self, victim: Instance, for_load: FunctionId, *, blocking: bool
    ) -> Turn | None:
        """Whether a victim is needed later than the function of its model that wants its place."""
        model = self._models[victim.function.model]
        layer, expert = victim.function.layer, victim.function.expert
        planned = bool(model.board.planned_LED[layer, expert, victim.device])
        turn = Turn.OWN if planned else Turn.SURPLUS
        only_copy = self._is_only_copy(victim)
        current = model.is_running(layer)
        if blocking:
            return None if current and only_copy and self._is_kept(victim, for_load) else turn
        if current:
            return None
        if not planned and not only_copy:
            return turn
        return turn if self.needed_in(victim.function) > self.needed_in(for_load) else None

    def _is_only_copy(self, victim: Instance) -> bool:
        layer, expert = victim.function.layer, victim.function.expert
        warm_D = self._models[victim.function.model].board.warm_LED[layer, expert]
        return bool(warm_D.sum() <= 1)

    def _is_kept(self, victim: Instance, for_load: FunctionId) -> bool:
        """Whether an engine that computes the victim's layer keeps it from those who wait."""
        theirs = self._waiters.place_of_function(for_load)
        model = self._models[victim.function.model]
        for engine, layer in model.running_layers().items():
            if layer == victim.function.layer:
                place = self._waiters.place_of_engine(victim.function.model, engine)
                if place is None and model.activity.still_s(engine) < _STUCK_S:
                    return True
                if place is not None and place <= theirs:
                    return True
        return False
