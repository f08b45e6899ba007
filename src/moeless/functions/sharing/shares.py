"""How the models of a pool share its devices' memory: who yields to whom, and who never does.

A model may be guaranteed a share of each device. Memory that nobody needs is anybody's. When room
is made for a model that is busy, or below its share, it is taken, in this order, from

1. models above their share that are idle,
2. models above their share that are busy, as long as they are further above it than the model
   that gets the room will be: so busy models end equally far above their shares,
3. models at or below their share without traffic for a minute, or without engines,
4. the model's own instances that are needed later,
5. where tokens wait and nothing else is left, busy models above their share,

and never from a model at or below its share while it has traffic. A model that is idle itself
takes from others only up to its share, or up to what others have beyond theirs.

It must not know torch, sockets or processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

from moeless.core.memory_share import MemoryShare
from moeless.core.model import FunctionId, ModelSpec
from moeless.functions.pool.lifecycle import Instance
from moeless.functions.pool.pool import DevicePool
from moeless.functions.sharing.activity import Activity


class Sharer(Protocol):
    """A model that shares devices with others."""

    spec: ModelSpec
    function_bytes: int
    share: MemoryShare
    activity: Activity

    def is_busy(self) -> bool:
        """Whether it has requests now."""
        ...


class Turn(IntEnum):
    """Whose instances go first; see the module."""

    SURPLUS = 0
    """Replicas of its own that nobody plans."""
    IDLE = 1
    BUSY = 2
    ASLEEP = 3
    OWN = 4
    LAST = 5


class Shares:
    """Compares what models hold with what they are guaranteed.

    Args:
        models: By id; kept up to date by the owner.
        pools: One per device; kept up to date by the owner.
    """

    def __init__(self, models: Mapping[str, Sharer], pools: Sequence[DevicePool]) -> None:
        self._models = models
        self._pools = pools

    def guaranteed_slots(self, model: Sharer, device: int) -> int:
        """Instances of a model that a device has room for by right."""
        budget = self._pools[device].budget_bytes
        promised = sum(other.share.bytes_of(budget) for other in self._models.values())
        own = model.share.bytes_of(budget)
        if promised > budget:  # the device has shrunk since
            own = own * budget // promised
        return own // model.function_bytes

    def kept_bytes(self, model: Sharer, device: int) -> int:
        """Bytes of a model on a device that nobody may take."""
        if model.activity.is_asleep():
            return 0
        held = self._pools[device].bytes_of(model.spec.model_id)
        return min(held, self.guaranteed_slots(model, device) * model.function_bytes)

    def available_slots(self, model: Sharer, device: int) -> int:
        """Instances of a model that a device could hold now, others reduced to what they keep."""
        kept = sum(self.kept_bytes(other, device) for other in self.others(model))
        return max(0, self._pools[device].budget_bytes - kept) // model.function_bytes

    def others(self, model: Sharer) -> Iterator[Sharer]:
        """The models that it shares devices with."""
        return (other for other in self._models.values() if other is not model)

    def turn_of(
        self,
        victim: Instance,
        *,
        for_load: FunctionId,
        blocking: bool,
        leaving: Mapping[str, int],
    ) -> Turn | None:
        """When another model's instance has to make room for a load, if it has.

        Args:
            victim: The instance.
            for_load: What is to be loaded, of another model.
            blocking: Tokens wait for it.
            leaving: Bytes that are to make room already, by model.
        """
        owner, loader = self._models[victim.function.model], self._models[for_load.model]
        device = victim.device
        gone = leaving.get(victim.function.model, 0)
        excess = self._excess_bytes(owner, device) - gone
        after = self._excess_bytes(loader, device) + loader.function_bytes
        after -= leaving.get(for_load.model, 0)
        within = after <= 0
        eager = blocking or within or loader.is_busy()
        if excess <= 0:
            return Turn.ASLEEP if eager and owner.activity.is_asleep() else None
        fair = within or excess > after
        if not owner.is_busy():
            return Turn.IDLE if eager or fair else None
        if eager and fair:
            return Turn.BUSY
        return Turn.LAST if blocking else None

    def _excess_bytes(self, model: Sharer, device: int) -> int:
        """Bytes that a model holds beyond its share; negative if it holds less."""
        guaranteed = self.guaranteed_slots(model, device) * model.function_bytes
        return self._pools[device].bytes_of(model.spec.model_id) - guaranteed
