"""Orders for the host of one device, in sequence, and what its thread does while none comes."""

import contextlib
import queue
import time
from typing import Generic, Protocol, TypeVar

Order = TypeVar("Order")

_LAY_OUT_AFTER_S = 0.02
"""Without orders for so long there is time to lay weights out anew."""
_AT_LATEST_S = 1.0
"""An order that comes after so long without a pause lets one instance's weights go first."""
_REST_AFTER_S = 1.0
"""Without orders for so long what only loads need is given back."""


class IdleHost(Protocol):
    """The part of a host that wants to be told of pauses."""

    def lay_out_next(self) -> bool:
        """Lay out one instance's weights anew; whether there was one to do."""
        ...

    def rest(self) -> None:
        """No load follows for now."""
        ...


class OrderQueue(Generic[Order]):
    """Filled by one thread, emptied by the one that carries the orders out.

    Args:
        host: What the orders are for.
    """

    def __init__(self, host: IdleHost) -> None:
        self._host = host
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._paused_s = time.monotonic()

    def put(self, order: Order) -> None:
        """Append an order; never blocks."""
        self._orders.put(order)

    def take(self) -> Order:
        """The next order, as soon as there is one."""
        if time.monotonic() - self._paused_s < _AT_LATEST_S:
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=_LAY_OUT_AFTER_S)
        while self._host.lay_out_next():
            self._paused_s = time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._orders.get_nowait()
        self._paused_s = time.monotonic()
        with contextlib.suppress(queue.Empty):
            return self._orders.get(timeout=_REST_AFTER_S)
        self._host.rest()
        order = self._orders.get()
        self._paused_s = time.monotonic()
        return order
