"""Which instances have been idle for longer than they are kept.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from moeless.core.model import FunctionId
from moeless.core.plan import CountArray
from moeless.core.ports import Clock, KeepAlive
from moeless.functions.links.board import EngineBoard
from moeless.functions.pool.lifecycle import Instance
from moeless.functions.pool.pool import DevicePool


class UsedModel(Protocol):
    """A model whose engines say when they used which instance."""

    keep_alive: KeepAlive | None
    left_s: float
    earlier_used_ns_LED: CountArray

    @property
    def demands(self) -> Mapping[int, object]:
        """What tokens of its engines wait for."""
        ...

    @property
    def engines(self) -> Mapping[int, EngineBoard]:
        """The boards of engines that use it now."""
        ...


class IdleInstances:
    """Looks for idle instances.

    Nobody can use an instance before its layer's next turn. So one that was used in its layer's
    latest turn, or came after it, is idle only from the moment on at which its engine last used
    anything: a step that takes longer than instances are kept (its experts came from a slow disk)
    finds the next step's experts still there.

    Args:
        models: By id; kept up to date by the owner.
        keep_alive: How long idle instances stay, of models without a rule of their own.
        clock: The time.
        linger_s: How long those of a model without engines stay at most.
    """

    def __init__(
        self,
        models: Mapping[str, UsedModel],
        keep_alive: KeepAlive,
        *,
        clock: Clock,
        linger_s: float,
    ) -> None:
        self._models = models
        self._keep_alive = keep_alive
        self._clock = clock
        self._linger_s = linger_s
        self._used_ns: dict[str, CountArray] = {}
        self._idle_since_ns: dict[str, CountArray] = {}

    def look(self) -> None:
        """Read from the engines' boards what they have used."""
        self._used_ns, self._idle_since_ns = {}, {}
        for name, model in self._models.items():
            boards = model.engines.values()
            used_ns_LED = model.earlier_used_ns_LED.copy()
            for board in boards:
                np.maximum(used_ns_LED, board.used_ns_LED, out=used_ns_LED)
            self._used_ns[name] = used_ns_LED
            self._idle_since_ns[name] = idle_since_ns_LED(
                used_ns_LED, [board.used_ns_LED for board in boards]
            )

    def expired(self, pool: DevicePool, *, now_s: float) -> list[Instance]:
        """Warm instances of a device that may go."""
        self._note_use(pool)
        return pool.expired(self._keep_s, now_s=now_s)

    def _keep_s(self, function: FunctionId, idle_s: float) -> float:
        """Seconds that an instance may be idle."""
        model = self._models[function.model]
        if model.demands:
            return math.inf  # what loads ahead must not leave before its layer's turn
        if not model.engines and self._clock.now_s() - model.left_s >= self._linger_s:
            return 0.0
        return (model.keep_alive or self._keep_alive).keep_s(function, idle_s=idle_s)

    def _note_use(self, pool: DevicePool) -> None:
        """Bring the pool's view of idle times up to date."""
        for instance in list(pool.instances()):
            function = instance.function
            place = function.layer, function.expert, pool.device
            idle_since_s = self._idle_since_ns[function.model][place] / 1e9
            used_s = self._used_ns[function.model][place] / 1e9
            if used_s > instance.idle_since_s:
                model = self._models[function.model]
                (model.keep_alive or self._keep_alive).used(function, at_s=used_s)
            if idle_since_s > instance.idle_since_s:
                pool.used(function, finished_s=idle_since_s)


def idle_since_ns_LED(used_ns_LED: CountArray, by_engine: Iterable[CountArray]) -> CountArray:
    """From when on instances count as idle, int64 [L, E, D].

    Args:
        used_ns_LED: When any engine last used an instance, or it became warm.
        by_engine: When each engine that is there last used instances, each [L, E, D]; 0 for never.
    """
    since_ns_LED: CountArray = used_ns_LED.copy()
    for own_ns_LED in by_engine:
        turn_ns_L11 = own_ns_LED.max(axis=(1, 2), keepdims=True)
        awaits_turn_LED = used_ns_LED >= turn_ns_L11
        np.maximum(since_ns_LED, turn_ns_L11.max(), out=since_ns_LED, where=awaits_turn_LED)
    return since_ns_LED
