"""How many instances a model may plan for on each device, beside what others use by right.

Busy models share what is guaranteed to nobody equally, as far as they use it; what one leaves
others may have. Idle ones keep what they hold of their share, and those asleep nothing.

It must not know torch, sockets or processes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from moeless.core.plan import CountArray
from moeless.functions.links.board import ModelBoard
from moeless.functions.pool.pool import DevicePool
from moeless.functions.sharing.shares import Sharer, Shares

_GRAINS = 16
"""What others use is rounded up to such a part of a device, so that plans do not follow each
instance that comes and goes."""
_REMEMBERED = 20
"""Looks for which the most that a model has used counts, for the same reason."""


class Planned(Sharer, Protocol):
    """A model whose plans are known."""

    board: ModelBoard


class FairSlots:
    """Looks now and then at what models use.

    Args:
        models: By id; kept up to date by the owner.
        pools: One per device; kept up to date by the owner.
        shares: What is guaranteed.
    """

    def __init__(
        self, models: Mapping[str, Planned], pools: Sequence[DevicePool], shares: Shares
    ) -> None:
        self._models = models
        self._pools = pools
        self._shares = shares
        self._uses: dict[str, deque[CountArray]] = {}

    def look(self) -> None:
        """Note what models plan for."""
        for model_id, model in self._models.items():
            planned = np.count_nonzero(model.board.planned_LED, axis=(0, 1))
            uses = self._uses.setdefault(model_id, deque(maxlen=_REMEMBERED))
            uses.append(planned * model.function_bytes)

    def slots_D(self, model: Planned) -> CountArray:
        """Instances that a model may plan for on each device, int64 [D]."""
        fair: CountArray = np.array(
            [
                (pool.budget_bytes - self._others_bytes(model, pool)) // model.function_bytes
                for pool in self._pools
            ],
            dtype=np.int64,
        )
        if fair.sum() >= model.spec.num_experts:
            return fair
        # A layer must fit, whatever is fair: models take turns then.
        devices = range(len(self._pools))
        return np.array([self._shares.available_slots(model, d) for d in devices], dtype=np.int64)

    def _others_bytes(self, model: Planned, pool: DevicePool) -> int:
        others = [other for other in self._models.values() if other is not model]
        if not others:
            return 0
        busy = [model, *(other for other in others if other.is_busy())]
        awake = [other for other in others if not other.activity.is_asleep()]
        promised = sum(self._guaranteed(other, pool) for other in (model, *awake))
        free_bytes = max(0, pool.budget_bytes - promised) // len(busy)
        total = 0
        for other in others:
            kept = self._shares.kept_bytes(other, pool.device)
            if other.is_busy():
                right = self._guaranteed(other, pool) + free_bytes
                kept = max(kept, min(right, self._used_bytes(other, pool)))
            total += kept
        return min(total, pool.budget_bytes)

    def _guaranteed(self, model: Planned, pool: DevicePool) -> int:
        return self._shares.guaranteed_slots(model, pool.device) * model.function_bytes

    def _used_bytes(self, model: Planned, pool: DevicePool) -> int:
        uses = self._uses.get(model.spec.model_id)
        used = max((int(use_D[pool.device]) for use_D in uses), default=0) if uses else 0
        grain = max(1, pool.budget_bytes // _GRAINS)
        return -(-used // grain) * grain
