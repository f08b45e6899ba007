"""Orders to the hosts of all devices, and what follows from giving them.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moeless.core.model import FunctionId
from moeless.core.plan import ReplicaArray
from moeless.core.ports import Clock
from moeless.functions.platform.host_port import HostPort
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.pool.lifecycle import Instance
from moeless.functions.pool.load_limits import LoadLimits
from moeless.functions.pool.pool import DevicePool, Evict, Load


class LoadTime(NamedTuple):
    """How long a load took.

    Args:
        began_s: When it was ordered.
        busy_s: How long its device was at it, and not at the load before it.
    """

    began_s: float
    busy_s: float


class HostOrders:
    """Has loads and evictions carried out.

    Says on the boards what is no longer warm, and accounts for the bytes that an instance holds,
    from the order to load it on.

    Args:
        models: By id; kept up to date by the owner.
        clock: The time.
        limits: Say which loads make one order.
    """

    def __init__(
        self, models: Mapping[str, ModelPlacement], *, clock: Clock, limits: LoadLimits
    ) -> None:
        self._models = models
        self._clock = clock
        self._limits = limits
        self._load_began_s: dict[tuple[FunctionId, int], float] = {}
        self._load_ended_s: dict[int, float] = {}
        self.hosts: dict[int, HostPort] = {}
        """By device, of the devices that are up; kept up to date by the owner."""

    def carry_out(self, pool: DevicePool, orders: Sequence[Load | Evict]) -> None:
        """Have orders of one device carried out, which must be up."""
        for is_load, group in itertools.groupby(orders, key=lambda order: isinstance(order, Load)):
            if is_load:
                self._load(pool, [order.function for order in group])
                continue
            for order in group:
                assert isinstance(order, Evict)
                function = order.function
                model = self._models[function.model]
                model.board.warm_LED[function.layer, function.expert, pool.device] = 0
                model.unsettle(function.layer)
                self.hosts[pool.device].evict(function, reason=order.reason)

    def _load(self, pool: DevicePool, functions: Sequence[FunctionId]) -> None:
        loads: list[tuple[FunctionId, int]] = []
        for function in functions:
            instance = pool.instance(function)
            self._load_began_s[function, pool.device] = self._clock.now_s()
            self._account(instance, +1)
            loads.append((function, instance.num_bytes))
        for batch in self._limits.batches(loads):
            self.hosts[pool.device].load(*batch)

    def advance(self, pool: DevicePool) -> None:
        """Have all carried out that the pool of a device that is up wants and can afford now."""
        now_s = self._clock.now_s()
        while orders := pool.advance(now_s=now_s):
            self.carry_out(pool, orders)

    def end_load(self, function: FunctionId, device: int) -> LoadTime:
        """A load has ended, well or not."""
        now_s = self._clock.now_s()
        began_s = self._load_began_s.pop((function, device), now_s)
        # A device carries out its orders one after the other, and has some in advance.
        busy_since_s = max(began_s, self._load_ended_s.get(device, began_s))
        self._load_ended_s[device] = now_s
        return LoadTime(began_s=began_s, busy_s=now_s - busy_since_s)

    def forget_device(self, device: int) -> None:
        """No load of a device will end."""
        self._load_began_s = {k: v for k, v in self._load_began_s.items() if k[1] != device}

    def note_freed(self, instance: Instance) -> None:
        """An instance has ceased to hold its bytes."""
        self._account(instance, -1)

    def loading_ED(self, model: ModelPlacement, layer: int) -> ReplicaArray:
        """1 where an instance of the layer is loading, uint8 [E, D]."""
        loading = np.zeros(model.board.warm_LED.shape[1:], dtype=np.uint8)
        for function, device in self._load_began_s:
            if function.model == model.spec.model_id and function.layer == layer:
                loading[function.expert, device] = 1
        return loading

    def _account(self, instance: Instance, sign: int) -> None:
        function = instance.function
        self._models[function.model].meter.add_bytes(
            function.layer, sign * instance.num_bytes, now_s=self._clock.now_s()
        )
