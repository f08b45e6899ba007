"""How many loads a device has under way, and how many of them make one order.

An order and the report of its end cost both processes a system call, a waking and a turn of the
platform: more than a small expert's load itself takes. So small loads are ordered and reported
together. Bytes limit how many: large experts still come one by one, and what tokens begin to wait
for is never behind more than a few milliseconds of work. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moeless.core.model import FunctionId

BATCH_BYTES = 1 << 20
"""What loads of one order hold at most where orders take time: at the speed of memory they end
within two milliseconds."""
_ORDERS = 2
"""Orders under way at once, so that a host has the next one when it ends one."""
_MOST = 64
"""Loads of one order at most, however small they are."""


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """Limits of one device.

    Args:
        loads: Loads under way at once, whatever they hold; nothing is evicted for more of them.
        batch_bytes: What loads of one order hold at most, if there are several; 0 has each load
            ordered by itself. As long as all that are under way hold no more than two such orders,
            there may be more than ``loads``.
    """

    loads: int = _ORDERS
    batch_bytes: int = 0

    def admits(self, num_bytes: int, *, under_way: int, under_way_bytes: int) -> bool:
        """Whether another load may begin.

        Args:
            num_bytes: What it will hold.
            under_way: Loads that have begun and not ended.
            under_way_bytes: What those hold.
        """
        if under_way < self.loads:
            return True
        each = min(_MOST, self.batch_bytes // num_bytes)
        most_bytes = _ORDERS * self.batch_bytes
        return under_way < _ORDERS * each and under_way_bytes + num_bytes <= most_bytes

    def batches(self, loads: list[tuple[FunctionId, int]]) -> Iterator[list[FunctionId]]:
        """Put loads into orders, in their sequence.

        Args:
            loads: Functions, with the bytes that their instances will hold.
        """
        batch: list[FunctionId] = []
        held = 0
        for function, num_bytes in loads:
            if batch and (held + num_bytes > self.batch_bytes or len(batch) >= _MOST):
                yield batch
                batch, held = [], 0
            batch.append(function)
            held += num_bytes
        if batch:
            yield batch


ONE_BY_ONE = LoadLimits()
