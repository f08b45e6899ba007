"""A device's host in simulated time: loads take what the link needs, one after the other."""

from collections.abc import Callable
from functools import partial

from moeless.core.model import FunctionId
from moeless.functions.platform.platform import Platform
from moeless.simulator.event_loop import EventLoop


class SimulatedHost:
    """Carries out one device's orders in simulated time. A ``platform.host_port.HostPort``.

    A load occupies the device's link to the host; another one in flight waits for it. Evictions
    take no time.

    Args:
        device: Device index.
        loop: Simulated time.
        platform: Told when an order has ended.
        load_s: Seconds that one load occupies the link.
        on_change: Called after the platform was told.
    """

    def __init__(
        self,
        device: int,
        *,
        loop: EventLoop,
        platform: Platform,
        load_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._device = device
        self._loop = loop
        self._platform = platform
        self._load_s = load_s
        self._on_change = on_change
        self._link_free_s = 0.0

    def load(self, *functions: FunctionId) -> None:
        """Begin to load; the platform is told when the bytes have arrived."""
        for function in functions:
            begin_s = max(self._loop.clock.time_s, self._link_free_s)
            self._link_free_s = begin_s + self._load_s
            self._loop.at(self._link_free_s, partial(self._end_load, function))

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Evict; the platform is told at once, but not before its caller has returned."""
        self._loop.at(self._loop.clock.time_s, partial(self._end_eviction, function, reason))

    def _end_load(self, function: FunctionId) -> None:
        self._platform.loaded(self._device, function)
        self._on_change()

    def _end_eviction(self, function: FunctionId, reason: str) -> None:
        self._platform.evicted(self._device, function, reason=reason)
        self._on_change()
