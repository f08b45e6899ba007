"""Measures how long decisions really take; simulated time must never depend on it."""

from array import array
from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from moeless.control.search import as_searching
from moeless.core.copies import divides_by_copies
from moeless.core.plan import CountArray, Plan, PlanRequest, ReplicaArray
from moeless.core.ports import Planner, Splitter


class TimedPlanner:
    """A planner and the seconds that each of its plans and searches took.

    A ``core.ports.Planner``, and a ``control.search.SearchingPlanner`` if the planner is one.

    Args:
        planner: Whom to time.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.seconds: array[float] = array("d")
        self.search_seconds: array[float] = array("d")
        searching = as_searching(planner)
        if searching is not None:
            self._begin_search = searching.begin_search
            self.observe = searching.observe
            self.search_due = searching.search_due
            self.stands = searching.stands
            self.begin_search = self._time_search

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas as the planner does, or raise what it raises."""
        began_s = perf_counter()
        plan = self.planner.plan(request)
        self.seconds.append(perf_counter() - began_s)
        return plan

    def _time_search(self, layer: int) -> Callable[[], Callable[[], None]]:
        begin_s = perf_counter()
        search = self._begin_search(layer)
        begun_s = perf_counter()

        def timed() -> Callable[[], None]:
            search_s = perf_counter()
            take_up = search()
            self.search_seconds.append(perf_counter() - search_s + begun_s - begin_s)
            return take_up

        return timed


class TimedSplitter:
    """A splitter and the seconds that each of its splits took. A ``core.ports.Splitter``.

    Args:
        splitter: Whom to time.
    """

    def __init__(self, splitter: Splitter) -> None:
        self.splitter = splitter
        self.divides_by_copies = divides_by_copies(splitter)
        self.seconds: array[float] = array("d")

    def split(
        self, count_E: CountArray, replicas_ED: NDArray[np.bool_] | ReplicaArray
    ) -> CountArray:
        """Divide tokens as the splitter does."""
        began_s = perf_counter()
        share_ED = self.splitter.split(count_E, replicas_ED)
        self.seconds.append(perf_counter() - began_s)
        return share_ED
