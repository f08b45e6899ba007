"""Searches for better replica sets, beside the token path and beside planning.

A planner may keep a set that only a longer search improves. The control loop tells it what came
true, asks whether a search is due, has it carried out elsewhere and takes up what was found. A
planner takes part by having the methods of ``SearchingPlanner``. With a method ``inherit`` it also
takes over the loads that one of its kind has observed for other devices.
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
        """Whether a layer should be searched."""
        ...

    def begin_search(self, layer: int) -> Callable[[], Callable[[], None]]:
        """Note what is known of a layer. Like all others, called while no other method runs.

        Returns:
            The search for a better set. It may take long, and run in another thread beside the
            planner's methods, so it changes nothing; it returns what takes up its result, which
            is called like a method again.
        """
        ...

    def stands(self, layer: int) -> bool:
        """Whether the next plan would most likely be the same: searches find nothing better."""
        ...


class Search:
    """A search of one layer that is to be carried out; called, it does all of it.

    Args:
        layer: MoE layer.
        begin: Notes what is known of a layer: the loads that have come true, and the search.
        end: Told this search and its result, or what it raised.
    """

    def __init__(
        self,
        layer: int,
        *,
        begin: Callable[[int], tuple[int, Callable[[], Callable[[], None]]]],
        end: "Callable[[Search, Callable[[], None] | Exception], None]",
    ) -> None:
        self.layer = layer
        self.loads = 0
        """Loads of the layer that had come true when it began."""
        self._begin = begin
        self._end = end
        self._search: Callable[[], Callable[[], None]] | None = None

    def begin(self) -> None:
        """Note what is known now, which is all that it depends on."""
        try:
            self.loads, self._search = self._begin(self.layer)
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            self._end(self, error)

    def finish(self) -> None:
        """Search, and hand the result over; does not raise."""
        if self._search is None:
            return  # it could not even begin
        try:
            result = self._search()
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            self._end(self, error)
        else:
            self._end(self, result)

    def __call__(self) -> None:
        """Begin and finish."""
        self.begin()
        self.finish()


class Searcher(Protocol):
    """Has searches carried out, one at a time, in the order in which they were submitted."""

    def submit(self, search: Search) -> bool:
        """Have a search carried out soon; must not block for long.

        Returns:
            Whether it is over.
        """
        ...


class InlineSearcher:
    """Searches at once, in the caller's thread."""

    def submit(self, search: Callable[[], None]) -> bool:
        """Carry it out now."""
        search()
        return True


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

    def submit(self, search: Callable[[], None]) -> bool:
        """Queue it."""
        self._searches.put(search)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="search", daemon=True)
            self._thread.start()
        return False

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
    if not callable(getattr(planner, "begin_search", None)):
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
