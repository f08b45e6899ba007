"""Simulated time: a clock, and one heap of what happens next."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class SimulatedClock:
    """A clock that the event loop sets. A ``core.ports.Clock``."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        """The simulated time in seconds."""
        return self.time_s


class EventLoop:
    """Carries out actions in the order of their times; at equal times in the order of arrival.

    Args:
        clock: Set to each action's time before it is carried out.
    """

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0
        self._running = False

    def at(self, time_s: float, action: Action) -> None:
        """Have an action carried out at a time, which must not have passed."""
        assert time_s >= self.clock.time_s
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, action))

    def has_more(self) -> bool:
        """Whether anything is still to happen."""
        return bool(self._heap)

    def stop(self) -> None:
        """Return from ``run`` after the action in hand; what is left stays for the next run."""
        self._running = False

    def run(self) -> None:
        """Carry out actions until there are none, or ``stop`` is called."""
        self._running = True
        heap, clock = self._heap, self.clock
        while heap and self._running:
            clock.time_s, _, action = heapq.heappop(heap)
            action()
