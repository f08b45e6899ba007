"""The models of a platform beside each other: what each may have, looked at again and again.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

from collections.abc import Mapping, Sequence

from moeless.core.memory_share import MemoryShare
from moeless.core.model import ModelSpec
from moeless.core.plan import CountArray
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.pool.pool import DevicePool
from moeless.functions.sharing.fair_slots import FairSlots
from moeless.functions.sharing.share_check import check_share
from moeless.functions.sharing.shares import Shares


class ModelShares:
    """Keeps models' capacities and reservations up to date.

    Args:
        models: By id; kept up to date by the owner.
        pools: One per device; kept up to date by the owner.
    """

    def __init__(self, models: Mapping[str, ModelPlacement], pools: Sequence[DevicePool]) -> None:
        self._models = models
        self._pools = pools
        self.shares = Shares(models, pools)
        self._fair = FairSlots(models, pools, self.shares)

    def check(self, spec: ModelSpec, function_bytes: int, share: MemoryShare) -> None:
        """Refuse a model that cannot be served beside those that have engines.

        Raises:
            BudgetError: It cannot; the message has the figures.
        """
        used = (m for m in self._models.values() if m.engines and m.spec.model_id != spec.model_id)
        budgets = [pool.budget_bytes for pool in self._pools if pool.budget_bytes]
        check_share(spec, function_bytes, share, others=used, budgets_bytes=budgets)

    def check_budgets(self, budgets_bytes: Sequence[int]) -> None:
        """Refuse budgets with which the models that have engines could not all be served.

        Raises:
            BudgetError: They could not; the message has the figures.
        """
        used = [model for model in self._models.values() if model.engines]
        for model in used:
            check_share(
                model.spec,
                model.function_bytes,
                model.share,
                others=[other for other in used if other is not model],
                budgets_bytes=budgets_bytes,
            )

    def slots_D(self, model: ModelPlacement) -> CountArray:
        """Instances that a model may plan for on each device, int64 [D]."""
        return self._fair.slots_D(model)

    def look(self) -> None:
        """Note what models use, and follow it."""
        self._fair.look()
        self.review()

    def review(self) -> None:
        """See what models may plan for now, and what of the budgets each has to itself."""
        budgets = [pool.budget_bytes for pool in self._pools]
        used = [model for model in self._models.values() if model.engines]
        promised = [sum(model.share.bytes_of(budget) for budget in budgets) for model in used]
        rest = max(0, sum(budgets) - sum(promised))
        for model in self._models.values():
            if model not in used:
                model.account.reserve(0)
        for model, own in zip(used, promised, strict=True):
            model.account.reserve(own + rest // len(used))
        if len(self._models) > 1:
            for model in self._models.values():
                model.follow_slots(self._fair.slots_D(model))
