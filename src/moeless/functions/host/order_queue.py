"""Orders for the host of one device, in sequence, and what its thread does while none comes."""

import contextlib
import queue
from typing import Generic, Protocol, TypeVar

Order = TypeVar("Order")

_REST_AFTER_S = 1.0
"""Without orders for so long what only loads need is given back."""


class IdleHost(Protocol):
    """The part of a host that wants to be told of pauses."""

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

    def put(self, order: Order) -> None:
        """Append an order; never blocks."""
        self._orders.put(order)

    def take(self) -> Order:
        """The next order, as soon as there is one."""
        with contextlib.suppress(queue.Empty):
            return self._orders.get(timeout=_REST_AFTER_S)
        self._host.rest()
        return self._orders.get()
