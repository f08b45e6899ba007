"""Which load comes first and which instance goes first: what its layer's next turn says.

It must not know torch, sockets or processes.
"""

from collections.abc import Mapping
from typing import Protocol

from moeless.core.model import FunctionId, ModelSpec
from moeless.functions.board import Board
from moeless.functions.lifecycle import Instance


class RunningModel(Protocol):
    """A model whose layers take turns."""

    spec: ModelSpec
    board: Board


class NeedOrder:
    """Orders loads and evictions by when a layer runs next. A ``functions.pool.PoolOrder``.

    Args:
        models: By id; kept up to date by the owner.
    """

    def __init__(self, models: Mapping[str, RunningModel]) -> None:
        self._models = models

    def moment(self) -> object:
        """The layers whose gates spoke last: ``needed_in`` follows from them."""
        return [int(model.board.layer[0]) for model in self._models.values()]

    def needed_in(self, function: FunctionId) -> int:
        """Layers until the function's layer runs next, from 1 to L.

        The layer whose gate spoke last has had its turn: it counts as L.
        """
        model = self._models[function.model]
        ahead = (function.layer - int(model.board.layer[0])) % model.spec.num_layers
        return ahead or model.spec.num_layers

    def worth(self, instance: Instance) -> tuple[float, ...]:
        """Unplanned first; then what is needed last; then second copies; then the idlest."""
        model = self._models[instance.function.model]
        layer, expert = instance.function.layer, instance.function.expert
        warm_D = model.board.warm_LED[layer, expert]
        return (
            float(model.board.planned_LED[layer, expert, instance.device] > 0),
            -float(self.needed_in(instance.function)),
            float(warm_D.sum() <= 1),
            float(model.board.used_ns_LED[layer, expert, instance.device]),
        )

    def may_evict(self, victim: Instance, *, for_load: FunctionId, blocking: bool) -> bool:
        """Whether a victim is needed later than the function that wants its place."""
        model = self._models[victim.function.model]
        layer, expert = victim.function.layer, victim.function.expert
        only_copy = model.board.warm_LED[layer, expert].sum() <= 1
        current = layer == int(model.board.layer[0])
        if blocking:
            return not (current and only_copy)
        if current:
            return False
        planned = bool(model.board.planned_LED[layer, expert, victim.device])
        if not planned and not only_copy:
            return True
        return self.needed_in(victim.function) > self.needed_in(for_load)
