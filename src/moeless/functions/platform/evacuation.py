"""What leaves a device that holds more than its budget, and what is loaded elsewhere first.

A budget was made smaller, or the device is to end: then its budget is 0. Single-threaded like the
platform. It must not know torch, sockets or processes.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from moeless.core.model import FunctionId
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.pool.lifecycle import Instance, State
from moeless.functions.pool.pool import DevicePool
from moeless.functions.pool.pool_order import PoolOrder


class Want(Protocol):
    """Has a function made warm on a device, unless its load failed there a moment ago."""

    def __call__(self, model: ModelPlacement, layer: int, expert: int, device: int) -> None:
        """Ask for it."""
        ...


class Evacuation:
    """Chooses what leaves.

    An instance whose function is warm elsewhere may go at once. A last copy stays until the
    function is warm elsewhere, as long as another device has room for it; where none has, it goes
    like anything that has to make room, and is loaded again when its layer needs it.

    Args:
        pools: One per device.
        models: By id; kept up to date by the owner.
        order: Which instances are missed least.
        want: Asks for loads elsewhere.
    """

    def __init__(
        self,
        pools: Sequence[DevicePool],
        models: Mapping[str, ModelPlacement],
        *,
        order: PoolOrder,
        want: Want,
    ) -> None:
        self._pools = pools
        self._models = models
        self._order = order
        self._want = want

    def leavers(self, pool: DevicePool) -> list[FunctionId]:
        """What has to leave a device now; last copies are asked for elsewhere meanwhile."""
        over_bytes = -pool.free_bytes
        if over_bytes <= 0:
            return []
        warm = (i for i in pool.instances() if i.state is State.WARM)
        chosen: list[Instance] = []
        for instance in sorted(warm, key=lambda i: (self._order.worth(i), i.function)):
            if over_bytes <= 0:
                break
            chosen.append(instance)
            over_bytes -= instance.num_bytes
        leaving = [i.function for i in chosen if not self._is_last(i)]
        last = sorted(
            (i for i in chosen if self._is_last(i)),
            key=lambda i: (self._order.needed_in(i.function), i.function),
        )
        return leaving + self._homeless(pool, last)

    def _is_last(self, instance: Instance) -> bool:
        layer, expert = instance.function.layer, instance.function.expert
        return int(self._models[instance.function.model].board.warm_LED[layer, expert].sum()) <= 1

    def _homeless(self, pool: DevicePool, last: list[Instance]) -> list[FunctionId]:
        """Last copies that no other device has room for; the others are asked for there.

        Those needed soonest get the room.
        """
        if not last:
            return []
        others = [other for other in self._pools if other is not pool]
        coming = {p.device: p.fitting() for p in others}
        left_bytes = {device: left for device, (_, left) in coming.items()}
        found = []
        for instance in last:
            function = instance.function
            model = self._models[function.model]
            if any(
                p.state(function) is State.LOADING or function in coming[p.device][0]
                for p in others
            ):
                continue
            able = [
                p
                for p in others
                if left_bytes[p.device] >= instance.num_bytes and model.board.device_up_D[p.device]
            ]
            if not able:
                found.append(function)
                continue
            place = max(able, key=lambda p: (left_bytes[p.device], -p.device))
            left_bytes[place.device] -= instance.num_bytes
            self._want(model, function.layer, function.expert, place.device)
        return found
