"""Searches for better replica sets, beside the token path and beside planning.

A planner may keep a set that only a longer search improves. The control loop tells it what came
true, asks whether a search is due and has it carried out elsewhere; a later plan takes up what
was found. A planner takes part by having the methods of ``SearchingPlanner``. With a method
``inherit`` it also takes over the loads that one of its kind has observed for other devices.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

from moeless.core.plan import LoadArray
from moeless.core.ports import Planner
from moeless.errors import ConfigError

_LONGEST_REST_S = 0.2
"""However long a search took, others wait no longer than that."""


class SearchingPlanner(Planner, Protocol):
    """A planner that improves its sets between plans."""

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Take a load that came true, tokens [E]."""
        ...

    def search_due(self, layer: int) -> bool:
        """Whether ``search`` should be called for a layer."""
        ...

    def search(self, layer: int) -> None:
        """Look for a better set; may take long, and run in another thread than ``plan``."""
        ...

    def stands(self, layer: int) -> bool:
        """Whether the next plan would most likely be the same: searches find nothing better."""
        ...


class Searcher(Protocol):
    """Has searches carried out, one at a time, in the order in which they were submitted."""

    def submit(self, search: Callable[[], None]) -> None:
        """Have a search, which does not raise, carried out soon; must not block for long."""
        ...


class InlineSearcher:
    """Searches at once, in the caller's thread."""

    def submit(self, search: Callable[[], None]) -> None:
        """Carry it out now."""
        search()


class ThreadSearcher:
    """Searches in a thread of its own, started with the first one; it dies with the process.

    After each search it rests, so that planning and workers on the same cores are not held up.

    Args:
        share: Part of one core that searching may take, above 0, at most 1.
    """

    def __init__(self, share: float = 0.1) -> None:
        self._rest = 1.0 / share - 1.0
        self._searches: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, search: Callable[[], None]) -> None:
        """Queue it."""
        self._searches.put(search)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="search", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            search = self._searches.get()
            began_s = time.perf_counter()
            search()
            time.sleep(min(_LONGEST_REST_S, self._rest * (time.perf_counter() - began_s)))


def as_searching(planner: Planner) -> SearchingPlanner | None:
    """The planner, if it improves its sets between plans.

    Raises:
        ConfigError: It searches, but lacks a method that goes with that.
    """
    if not callable(getattr(planner, "search", None)):
        return None
    for name in ("observe", "search_due", "stands"):
        if not callable(getattr(planner, name, None)):
            raise ConfigError(
                f"planner {type(planner).__name__} searches but has no method {name}; "
                f"see moeless.control.search.SearchingPlanner"
            )
    return cast("SearchingPlanner", planner)


def inherit_loads(planner: SearchingPlanner, earlier: Planner) -> None:
    """Have a planner take over the loads that another one of its kind has observed, if it can."""
    inherit = getattr(planner, "inherit", None)
    if callable(inherit) and type(earlier) is type(planner):
        inherit(earlier)
