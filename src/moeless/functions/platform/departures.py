"""Instances that leave their devices although nobody needs their room at this moment.

They are surplus beside a plan, idle, or on a device that holds more than its budget. What leaves
to make room is the pool's to choose. Single-threaded like the platform. It must not know torch,
sockets or processes.
"""

from collections.abc import Sequence

from moeless.core.model import FunctionId
from moeless.core.ports import Clock
from moeless.functions.platform.evacuation import Evacuation
from moeless.functions.platform.host_orders import HostOrders
from moeless.functions.platform.idle_instances import IdleInstances
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.pool.pool import DevicePool

_MAX_DRAINING = 64
"""Evictions in flight on one device beyond which nothing else leaves: a host's orders and our
side of its reports must never both pile up."""


class Departures:
    """Sends instances away.

    Args:
        pools: One per device.
        orders: To the devices' hosts.
        evacuation: Chooses what leaves a device that holds more than its budget.
        idle: Chooses what has been idle for too long.
        clock: The time.
    """

    def __init__(
        self,
        pools: Sequence[DevicePool],
        orders: HostOrders,
        *,
        evacuation: Evacuation,
        idle: IdleInstances,
        clock: Clock,
    ) -> None:
        self._pools = pools
        self._orders = orders
        self._evacuation = evacuation
        self._idle = idle
        self._clock = clock

    def release_surplus(self, model: ModelPlacement, layer: int) -> None:
        """Evict a layer's surplus replicas; later if the layer is being computed now."""
        surplus = model.surplus(layer)
        if any(pool.free_bytes < 0 for pool in self._pools):
            model.held_back.add(layer)  # there may be more once those devices keep their budgets
        if not surplus:
            return
        if model.is_running(layer):
            model.held_back.add(layer)
            return
        for expert, device in surplus:
            pool = self._pools[device]
            if pool.num_draining >= _MAX_DRAINING:
                model.held_back.add(layer)
                continue
            self._send_away(pool, model.function(layer, expert), reason="released")

    def release_held_back(self, model: ModelPlacement) -> None:
        """Evict what could not be released when it became surplus."""
        for layer in sorted(model.held_back):
            if not model.is_running(layer):
                model.held_back.discard(layer)
                self.release_surplus(model, layer)

    def retire_idle(self) -> None:
        """Evict what has been idle for longer than it is kept."""
        now_s = self._clock.now_s()
        self._idle.look()
        for pool in self._pools:
            expired = self._idle.expired(pool, now_s=now_s)
            for instance in expired[: _room_to_drain(pool)]:
                self._send_away(pool, instance.function, reason="keep-alive")

    def evacuate(self) -> None:
        """Evict what devices hold beyond their budgets, as far as it may go now."""
        for pool in self._pools:
            if pool.free_bytes < 0 and pool.device in self._orders.hosts:
                reason = "budget" if pool.budget_bytes else "drained"
                for function in self._evacuation.leavers(pool)[: _room_to_drain(pool)]:
                    self._send_away(pool, function, reason=reason)

    def _send_away(self, pool: DevicePool, function: FunctionId, *, reason: str) -> None:
        evictions = pool.evict(function, reason=reason, now_s=self._clock.now_s())
        self._orders.carry_out(pool, evictions)


def _room_to_drain(pool: DevicePool) -> int:
    return max(0, _MAX_DRAINING - pool.num_draining)
