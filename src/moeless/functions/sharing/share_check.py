"""Whether a pool can promise a model a share of its memory, and still serve all others. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from moeless.core.memory_share import MemoryShare
from moeless.core.model import ModelSpec
from moeless.errors import BudgetError


class Promised(Protocol):
    """A model with its share."""

    spec: ModelSpec
    function_bytes: int
    share: MemoryShare


def check_share(
    spec: ModelSpec,
    function_bytes: int,
    share: MemoryShare,
    *,
    others: Iterable[Promised],
    budgets_bytes: Sequence[int],
) -> None:
    """Refuse a model that a pool cannot serve beside those that it has promised to serve.

    Every model must be able to hold one layer's experts at once outside of what others are
    guaranteed.

    Args:
        spec: The model.
        function_bytes: Bytes of one of its instances.
        share: What it asks for.
        others: The models that have engines now.
        budgets_bytes: Budgets of the devices in use.

    Raises:
        BudgetError: It cannot be served; the message has the figures.
    """
    others = list(others)
    for budget in budgets_bytes:
        taken = sum(other.share.bytes_of(budget) for other in others)
        if share.bytes_of(budget) > budget - taken:
            raise BudgetError(
                f"{spec.model_id} asks for {share} of each device, but of a device with "
                f"{budget:,} bytes only {budget - taken:,} are not guaranteed to others"
                f"{_names(others)}: ask for a smaller --memory-share"
            )
    slots = _slots(function_bytes, [other.share for other in others], budgets_bytes)
    if slots < spec.num_experts:
        total = f"{len(budgets_bytes)} devices" if len(budgets_bytes) != 1 else "device"
        beside = (
            f" beside what others are guaranteed{_names(others)}"
            if any(other.share.bytes_of(1 << 30) for other in others)
            else ""
        )
        least = -(-spec.num_experts // max(len(budgets_bytes), 1)) * function_bytes
        raise BudgetError(
            f"the device budgets hold {slots} experts of {function_bytes:,} bytes{beside}, but a "
            f"layer of {spec.model_id} has {spec.num_experts}: give each of the {total} at least "
            f"{least:,} bytes"
        )
    for other in others:
        rest = [share, *(third.share for third in others if third is not other)]
        slots = _slots(other.function_bytes, rest, budgets_bytes)
        if slots < other.spec.num_experts:
            raise BudgetError(
                f"{spec.model_id} asks for {share} of each device, which leaves room for {slots} "
                f"experts of {other.spec.model_id}, whose layers have {other.spec.num_experts}: "
                f"ask for a smaller --memory-share"
            )


def _slots(
    function_bytes: int, others: Iterable[MemoryShare], budgets_bytes: Sequence[int]
) -> int:
    """Instances that fit on all devices beside what others are guaranteed."""
    shares = list(others)
    return sum(
        max(0, budget - sum(share.bytes_of(budget) for share in shares)) // function_bytes
        for budget in budgets_bytes
    )


def _names(others: Iterable[Promised]) -> str:
    named = [f"{o.spec.model_id}: {o.share}" for o in others if o.share.bytes_of(1 << 30)]
    return f" ({', '.join(named)})" if named else ""
