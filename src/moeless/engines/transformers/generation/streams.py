"""Streams that carry token events from the engine thread to blocking or asynchronous readers.

This module must not know models or scheduling.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from moeless.core.generation import TokenEvent

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class EventStream:
    """The events of one request, for one reader.

    The reader may block (``for event in stream``) or await (``next_event``) in any event loop;
    the writer is another thread and never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._events: deque[TokenEvent] = deque()
        self._waiter: _Waiter | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the last event has been written."""
        return self._ended

    def __iter__(self) -> Iterator[TokenEvent]:
        """Block for each next event."""
        while True:
            with self._condition:
                while not self._events:
                    if self._ended:
                        return
                    self._condition.wait()
                event = self._events.popleft()
            yield event

    async def next_event(self) -> TokenEvent | None:
        """Await the next event; None after the last."""
        while True:
            with self._condition:
                if self._events:
                    return self._events.popleft()
                if self._ended:
                    return None
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, future)
            await future

    def append(self, event: TokenEvent) -> tuple[bool, _Waiter | None]:
        """Write an event; dropped when the stream has ended already.

        Returns:
            Whether it was written, and who must be woken in its own event loop.
        """
        with self._condition:
            if self._ended:
                return False, None
            self._events.append(event)
            self._ended = event.finish_reason is not None
            waiter, self._waiter = self._waiter, None
            self._condition.notify()
            return True, waiter


def deliver(deliveries: Iterable[tuple[EventStream, TokenEvent]]) -> list[bool]:
    """Write events to their streams and wake the readers, once per event loop.

    Returns:
        For each delivery, whether its stream still took it.

    Cost on the token path: one wake-up of each event loop however many streams it reads, so 200
    streams cost little more than one.
    """
    written: list[bool] = []
    sleepers: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for stream, event in deliveries:
        taken, waiter = stream.append(event)
        written.append(taken)
        if waiter is not None:
            sleepers.setdefault(waiter[0], []).append(waiter[1])
    for loop, futures in sleepers.items():
        try:
            loop.call_soon_threadsafe(_wake, futures)
        except RuntimeError:
            continue  # the loop is closed, so nobody awaits these streams any more
    return written


def _wake(futures: list["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():  # a reader that was cancelled is done
            future.set_result(None)
