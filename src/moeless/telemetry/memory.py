"""Keeps events in memory, for tests, dashboards and short runs."""

from collections import deque
from typing import TypeVar

from moeless.core.events import Event

EventT = TypeVar("EventT", bound=Event)


class MemorySink:
    """The newest events, oldest first. Any thread may emit and read.

    Args:
        limit: Events kept at the most; None keeps all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._events: deque[Event] = deque(maxlen=limit)

    def emit(self, event: Event) -> None:
        """Take one event."""
        self._events.append(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """A copy of what is kept."""
        return tuple(self._events.copy())

    def of(self, kind: type[EventT]) -> tuple[EventT, ...]:
        """The kept events of one type."""
        return tuple(event for event in self.events if isinstance(event, kind))
