"""Searches of a recorded run begin after as many loads, and end before the same load, as in it."""

import pytest

from moeless.control.search import Search
from moeless.core.events import SearchTaken
from moeless.errors import TraceError
from moeless.simulator.recorded_searcher import RecordedSearcher


def taken(layer, loads):
    return SearchTaken(time_s=1.0, model="m", layer=layer, loads=loads)


class Loop:
    """A control loop that submits a search of a layer with the first load that comes true."""

    def __init__(self, *events):
        self.searcher = RecordedSearcher(events)
        self.loads = {}
        self.seen = []

    def hear(self, layer, *to_end, comes_true=True):
        self.searcher.before_load(layer if comes_true else None, to_end)
        self.seen.append(f"load of {layer}")
        if comes_true:
            self.loads[layer] = self.loads.get(layer, 0) + 1
            if self.loads[layer] == 1:
                search = Search(layer, begin=self._begin, end=self._end)
                self.seen += ["over"] * self.searcher.submit(search)
        self.searcher.after_load()

    def _begin(self, layer):
        self.seen.append(f"begin {layer}")
        return self.loads[layer], lambda: lambda: None

    def _end(self, search, result):
        self.seen.append(f"end {search.layer}")


def test_a_search_begins_after_its_loads_and_ends_before_the_load_that_takes_it_up():
    event = taken(0, 2)
    loop = Loop(event)
    loop.hear(0)
    loop.hear(0)
    loop.hear(0)
    loop.hear(1, event)
    assert loop.seen == [
        "load of 0",
        "load of 0",
        "begin 0",
        "load of 0",
        "end 0",
        "load of 1",
    ]


def test_expected_loads_are_not_counted():
    event = taken(0, 2)
    loop = Loop(event)
    loop.hear(0)
    loop.hear(0, comes_true=False)
    assert "begin 0" not in loop.seen
    loop.hear(0)
    assert loop.seen[-1] == "begin 0"


def test_a_search_that_was_over_at_once_is_taken_up_by_the_same_load():
    event = taken(0, 1)
    loop = Loop(event)
    loop.hear(0, event)
    assert loop.seen == ["load of 0", "begin 0", "end 0", "over"]


def test_searches_run_in_the_order_in_which_they_were_submitted():
    first, second = taken(1, 1), taken(0, 2)
    loop = Loop(first, second)
    loop.hear(1)
    loop.hear(0)
    loop.hear(0)
    loop.hear(1, first, second)
    ends = [what for what in loop.seen if what.startswith("end")]
    assert ends == ["end 1", "end 0"]


def test_a_search_that_no_run_took_up_never_begins():
    loop = Loop()
    loop.hear(0)
    loop.hear(0)
    assert loop.seen == ["load of 0", "load of 0"]


def test_a_search_that_was_taken_up_without_having_begun_is_an_error():
    event = taken(0, 3)
    loop = Loop(event)
    loop.hear(0)
    with pytest.raises(TraceError, match="took up a search of layer 0 that began after 3 loads"):
        loop.hear(0, event)
