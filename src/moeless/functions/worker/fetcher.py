"""Has the disk deliver what is to be loaded next, in a thread of its own.

Whoever loads waits for the fetch of the same function to end, or does it itself where it has not
begun: two readers of the same bytes get in each other's way.
"""

import contextlib
import threading
from collections.abc import Callable

from moeless.core.model import FunctionId
from moeless.errors import MoelessError


class Fetcher:
    """Fetches functions in the order in which they are expected.

    Args:
        fetch: Has one function's bytes read into the system's memory; may be called from two
            threads at once.
    """

    def __init__(self, fetch: Callable[[FunctionId], None]) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._expected: dict[FunctionId, None] = {}  # in order
        self._fetching: FunctionId | None = None

    def start(self) -> None:
        """Start the thread; it lives as long as the process."""
        threading.Thread(target=self._run, name="fetcher", daemon=True).start()

    def expect(self, function: FunctionId) -> None:
        """A function will be loaded soon."""
        with self._changed:
            self._expected[function] = None
            self._changed.notify_all()

    def settle(self, function: FunctionId) -> None:
        """Return once a function that was expected has been fetched."""
        with self._changed:
            self._changed.wait_for(lambda: self._fetching != function)
            if function not in self._expected:
                return
            del self._expected[function]
        self._try(function)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._expected)
                function = next(iter(self._expected))
                del self._expected[function]
                self._fetching = function
            self._try(function)
            with self._changed:
                self._fetching = None
                self._changed.notify_all()

    def _try(self, function: FunctionId) -> None:
        with contextlib.suppress(MoelessError, MemoryError):  # loading says what is wrong
            self._fetch(function)
