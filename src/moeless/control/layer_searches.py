"""The searches of one control loop: from when they are due until their results are taken up.

A search runs beside everything else, but it begins and ends in step with the loop: what is known
when it begins is noted while the planner is not told or asked anything, and its result is taken up
by the loop, between two loads. So a run of which those moments are known can be repeated.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from moeless.control.search import Search, Searcher, SearchingPlanner
from moeless.core.plan import LoadArray


@dataclass(frozen=True, kw_only=True)
class EndedSearch:
    """A search whose result has been taken up.

    Args:
        layer: MoE layer.
        loads: How many loads of the layer had come true when it began.
        error: What it raised, if it did: then there was no result.
    """

    layer: int
    loads: int
    error: Exception | None


class LayerSearches:
    """Has a planner's searches carried out.

    Args:
        planner: Who improves its sets between plans.
        searcher: Carries searches out.
    """

    def __init__(self, planner: SearchingPlanner, searcher: Searcher) -> None:
        self._planner = planner
        self._searcher = searcher
        self._lock = threading.Lock()
        self._loads: Counter[int] = Counter()
        self._open: set[int] = set()
        self._ended: deque[tuple[Search, Callable[[], None] | Exception]] = deque()

    def planner_at_rest(self) -> AbstractContextManager[object]:
        """Whoever tells or asks the planner something does so in this context."""
        return self._lock

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> bool:
        """A load came true; a search follows if one is due.

        Returns:
            Whether a search is over already.
        """
        with self.planner_at_rest():
            self._planner.observe(step=step, layer=layer, load_E=load_E)
            self._loads[layer] += 1
        if layer in self._open or not self._planner.search_due(layer):
            return False
        self._open.add(layer)
        return self._searcher.submit(Search(layer, begin=self._begin, end=self._end))

    def take_up(self) -> Iterator[EndedSearch]:
        """Take up the results of all searches that have ended."""
        while self._ended:
            search, result = self._ended.popleft()
            error = result if isinstance(result, Exception) else None
            if not isinstance(result, Exception):
                try:
                    result()
                except Exception as raised:  # noqa: BLE001 - a policy may be anybody's
                    error = raised
            self._open.discard(search.layer)
            yield EndedSearch(layer=search.layer, loads=search.loads, error=error)

    def stands(self, layer: int) -> bool:
        """Whether the layer's set is not about to change."""
        return layer not in self._open and self._planner.stands(layer)

    def loads(self, layer: int) -> int:
        """How many loads of a layer have come true."""
        return self._loads[layer]

    def _begin(self, layer: int) -> tuple[int, Callable[[], Callable[[], None]]]:
        with self.planner_at_rest():
            return self._loads[layer], self._planner.begin_search(layer)

    def _end(self, search: Search, result: Callable[[], None] | Exception) -> None:
        self._ended.append((search, result))
