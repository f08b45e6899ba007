"""Which instances have been idle for longer than they are kept.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import math
from collections.abc import Mapping
from typing import Protocol

from moeless.core.model import FunctionId
from moeless.core.ports import Clock, KeepAlive
from moeless.functions.lifecycle import Instance
from moeless.functions.pool import DevicePool


class UsedModel(Protocol):
    """A model whose engines say when they used which instance."""

    keep_alive: KeepAlive | None
    left_s: float

    @property
    def demands(self) -> Mapping[int, object]:
        """What tokens of its engines wait for."""
        ...

    @property
    def engines(self) -> Mapping[int, object]:
        """Engines that use it now."""
        ...

    def last_used_ns(self, layer: int, expert: int, device: int) -> int:
        """When any engine last used an instance, or it became warm; monotonic clock."""
        ...


class IdleInstances:
    """Looks for idle instances.

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
        """Bring the pool's view of idle times up to date from the engines' boards."""
        for instance in list(pool.instances()):
            function = instance.function
            model = self._models[function.model]
            used_s = model.last_used_ns(function.layer, function.expert, pool.device) / 1e9
            if used_s > instance.last_used_s:
                pool.used(function, finished_s=used_s)
                (model.keep_alive or self._keep_alive).used(function, at_s=used_s)
