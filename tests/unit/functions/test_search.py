"""Searches beside planning: when the control loop has them carried out, and where."""

import threading

import numpy as np
import pytest

from effort import PATIENCE_S
from moeless.control.controller import Controller, ControllerConfig
from moeless.control.search import InlineSearcher, ThreadSearcher, as_searching
from moeless.core.clock import ManualClock
from moeless.core.events import PlanFailed, SearchTaken
from moeless.core.plan import Plan, PlanDiff
from moeless.core.policy_set import PolicySet
from moeless.errors import ConfigError
from moeless.policies.planners.static import StaticPlanner
from moeless.policies.predictors.previous import PreviousPredictor
from moeless.policies.splitters.even import EvenSplitter
from moeless.telemetry.memory import MemorySink


class Placement:
    num_devices = 1

    def alive_ED(self, layer):
        return np.ones((2, 1), dtype=np.uint8)

    planned_ED = alive_ED

    def capacity_D(self, layer):
        return np.array([2])

    def speed_D(self):
        return None

    def apply(self, plan, *, decision_s):
        return PlanDiff(layer=plan.layer)


class SearchingPlanner:
    def __init__(self):
        self.seen = []
        self.error = None

    def plan(self, request):
        self.seen.append(("plan", request.layer))
        replicas_ED = np.ones((2, 1), dtype=np.uint8)
        return Plan(step=1, layer=request.layer, replicas_ED=replicas_ED, load_E=request.load_E)

    def observe(self, *, step, layer, load_E):
        self.seen.append(("observe", layer))

    def search_due(self, layer):
        return layer == 1

    def stands(self, layer):
        return False

    def begin_search(self, layer):
        self.seen.append(("begin", layer))

        def search():
            self.seen.append(("search", layer))
            if self.error is not None:
                raise self.error
            return lambda: self.seen.append(("take up", layer))

        return search


class LateSearcher:
    def __init__(self):
        self.searches = []

    def submit(self, search):
        self.searches.append(search)


def make(searcher=None):
    planner, sink = SearchingPlanner(), MemorySink()
    controller = Controller(
        ControllerConfig(model="m", num_layers=2, num_experts=2),
        policies=PolicySet(
            name="test", planner=planner, splitter=EvenSplitter(), history=PreviousPredictor()
        ),
        placement=Placement(),
        clock=ManualClock(),
        sink=sink,
        searcher=searcher,
    )
    return controller, planner, sink


def observe(controller, layer, step=1):
    controller.observe(step=step, layer=layer, load_E=np.array([1.0, 2.0]))


def test_a_planner_is_told_what_came_true_and_searches_where_it_is_due():
    controller, planner, _ = make()
    observe(controller, 0)
    observe(controller, 1)
    assert planner.seen == [
        ("observe", 0),
        ("plan", 0),
        ("observe", 1),
        ("begin", 1),
        ("search", 1),
        ("take up", 1),
        ("plan", 1),
    ]


def test_a_layer_is_not_searched_again_before_its_search_has_ended():
    searcher = LateSearcher()
    controller, _, _ = make(searcher)
    observe(controller, 1)
    observe(controller, 1, step=2)
    assert len(searcher.searches) == 1
    searcher.searches[0]()
    observe(controller, 1, step=3)
    assert len(searcher.searches) == 2


def test_what_a_search_found_is_taken_up_by_the_loop_before_it_deals_with_the_next_load():
    searcher = LateSearcher()
    controller, planner, sink = make(searcher)
    observe(controller, 1)
    searcher.searches[0]()
    assert ("take up", 1) not in planner.seen
    assert not sink.of(SearchTaken)
    observe(controller, 0, step=2)
    assert planner.seen[-3:] == [("take up", 1), ("observe", 0), ("plan", 0)]
    assert [(event.layer, event.loads) for event in sink.of(SearchTaken)] == [(1, 1)]


def test_a_search_knows_what_has_come_true_when_it_begins():
    searcher = LateSearcher()
    controller, _, sink = make(searcher)
    for step in (1, 2, 3):
        observe(controller, 1, step=step)
    searcher.searches[0].begin()
    observe(controller, 1, step=4)
    searcher.searches[0].finish()
    observe(controller, 0, step=5)
    assert [(event.layer, event.loads) for event in sink.of(SearchTaken)] == [(1, 3)]


def test_a_search_that_cannot_begin_is_reported_and_may_begin_later():
    searcher = LateSearcher()
    controller, planner, sink = make(searcher)
    planner.begin_search = lambda layer: 1 / 0
    observe(controller, 1)
    searcher.searches[0]()
    observe(controller, 1, step=2)
    assert [event.reason for event in sink.of(PlanFailed)] == ["division by zero"]
    assert len(searcher.searches) == 2


def test_a_search_that_raises_is_reported_and_does_not_stop_planning():
    controller, planner, sink = make()
    planner.error = ZeroDivisionError("division by zero")
    observe(controller, 1)
    observe(controller, 1, step=2)
    failed = sink.of(PlanFailed)
    assert [(e.step, e.layer, e.reason) for e in failed] == [
        (1, 1, "division by zero"),
        (2, 1, "division by zero"),
    ]
    assert planner.seen.count(("plan", 1)) == 2


def test_a_thread_searches_in_order_and_elsewhere():
    searcher, seen, done = ThreadSearcher(), [], threading.Event()
    for number in range(3):
        searcher.submit(lambda n=number: seen.append((n, threading.current_thread().name)))
    searcher.submit(done.set)
    assert done.wait(timeout=PATIENCE_S)
    assert seen == [(n, "search") for n in range(3)]


def test_inline_searches_are_over_when_submit_returns():
    seen = []
    assert InlineSearcher().submit(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]


@pytest.mark.parametrize(("planner", "searches"), [(StaticPlanner(), False), (None, True)])
def test_a_planner_takes_part_by_its_methods(planner, searches):
    planner = planner or SearchingPlanner()
    assert (as_searching(planner) is planner) == searches


def test_a_planner_that_searches_without_the_rest_is_refused_not_ignored():
    planner = SearchingPlanner()
    planner.search_due = None
    with pytest.raises(
        ConfigError, match="SearchingPlanner searches but has no method search_due"
    ):
        as_searching(planner)
