"""Gives every event to several sinks."""

from moeless.core.events import Event
from moeless.core.ports import EventSink


class FanoutSink:
    """Passes events on, in the order of the sinks.

    Sinks must not raise, yet one that does (a third party's) cannot keep an event from the
    others, nor stop serving: its failures are counted.

    Args:
        sinks: Where events go; none at all is allowed and drops them.
    """

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks
        self._failures = 0

    @property
    def failures(self) -> int:
        """Times a sink raised."""
        return self._failures

    @property
    def lost(self) -> int:
        """Events that a sink has lost, or has raised at."""
        return self._failures + sum(getattr(sink, "lost", 0) for sink in self._sinks)

    def emit(self, event: Event) -> None:
        """Take one event."""
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception:  # noqa: BLE001 - any failure of a foreign sink stays with it
                self._failures += 1
