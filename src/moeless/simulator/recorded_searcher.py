"""Searches that begin and end when a record says so."""

from collections import deque
from collections.abc import Iterable, Sequence

from moeless.control.search import Search
from moeless.core.events import SearchTaken
from moeless.errors import TraceError


class RecordedSearcher:
    """Carries out what a run searched. A ``control.search.Searcher``.

    A run carries out its searches in the order in which they were submitted, and takes their
    results up in that order.

    Args:
        taken: When results were taken up, in order.
    """

    def __init__(self, taken: Iterable[SearchTaken]) -> None:
        self._to_begin = deque(taken)
        self._to_end: Sequence[SearchTaken] = ()
        self._waiting: deque[Search] = deque()
        self._begun: deque[Search] = deque()
        self._loads: dict[int, int] = {}

    def submit(self, search: Search) -> bool:
        """Have a search carried out when it was in the run."""
        self._waiting.append(search)
        self._begin_due()
        return self._end_due()

    def before_load(self, layer: int | None, to_end: Sequence[SearchTaken]) -> None:
        """A load is about to be dealt with.

        Args:
            layer: Of which layer it has come true; None if it is only expected.
            to_end: Searches whose results are taken up meanwhile.
        """
        self._to_end = to_end
        self._end_due()
        if layer is not None:
            self._loads[layer] = self._loads.get(layer, 0) + 1

    def after_load(self) -> None:
        """A load has been dealt with.

        Raises:
            TraceError: A search that was taken up meanwhile has not taken place.
        """
        if self._to_end:
            event = self._to_end[0]
            raise TraceError(
                f"{event.time_s:.6f} s: the run took up a search of layer {event.layer} that "
                f"began after {event.loads} loads, the replay has none"
            )
        self._begin_due()

    def _begin_due(self) -> None:
        while self._waiting and self._to_begin:
            search, event = self._waiting[0], self._to_begin[0]
            if search.layer != event.layer or self._loads.get(search.layer, 0) != event.loads:
                return
            self._waiting.popleft()
            self._to_begin.popleft()
            search.begin()
            self._begun.append(search)

    def _end_due(self) -> bool:
        """End what is due; returns whether anything was."""
        ended = False
        while self._to_end and self._begun:
            search, event = self._begun[0], self._to_end[0]
            if (search.layer, search.loads) != (event.layer, event.loads):
                return ended
            self._begun.popleft()
            self._to_end = self._to_end[1:]
            search.finish()
            ended = True
        return ended
