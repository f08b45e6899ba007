"""Writes the events that an operator must see to the log, seldom enough not to flood it."""

import logging

from moeless.core.events import Event, LoadFailed, PlanFailed
from moeless.core.ports import Clock

_log = logging.getLogger(__name__)


class FailureLog:
    """Warns of failed plans and loads.

    Args:
        clock: The time.
        every_s: Shortest time between two lines about the same kind of event; what happens in
            between is counted in the next line.
    """

    def __init__(self, clock: Clock, *, every_s: float = 10.0) -> None:
        self._clock = clock
        self._every_s = every_s
        self._next_s: dict[type[Event], float] = {}
        self._skipped: dict[type[Event], int] = {}

    def emit(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, PlanFailed | LoadFailed):
            return
        kind, now_s = type(event), self._clock.now_s()
        if now_s < self._next_s.get(kind, now_s):
            self._skipped[kind] = self._skipped.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + self._every_s
        more = self._skipped.pop(kind, 0)
        what = "plan" if isinstance(event, PlanFailed) else "load"
        _log.warning(
            "%s of %s, layer %d, failed: %s%s",
            what,
            event.model,
            event.layer,
            event.reason,
            f" (and {more} more)" if more else "",
        )
