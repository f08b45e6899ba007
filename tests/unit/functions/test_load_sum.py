"""What several engines send to one control loop is their sum."""

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.functions.planning.load_sum import LoadSum
from moeless.functions.sharing.activity import Activity


class Board:
    def __init__(self):
        self.step, self.layer = [0], [-1]


class Model:
    """Knows which engines there are, and whose step plans are for."""

    def __init__(self, clock):
        self.engines = {1: Board(), 2: Board()}
        self.speaker = None
        self.activity = Activity(self.engines, clock=clock)

    def go_on(self, engine):
        self.engines[engine].step[0] += 1


class Consumer:
    adaptive = True

    def __init__(self, model):
        self.model = model
        self.seen = []

    def observe(self, *, step, layer, load_E):
        self.note("observe", step, layer, load_E)

    def forecast(self, *, step, layer, load_E, expected_error=None):
        self.note("forecast", step, layer, load_E)
        self.error = expected_error

    def note(self, kind, step, layer, load_E):
        engine, ahead = self.model.speaker
        self.seen.append((engine, kind, step - ahead, layer, load_E.tolist()))
        self.step = step

    @property
    def last(self):
        return self.seen[-1]


@pytest.fixture
def clock():
    return ManualClock(0.0)


@pytest.fixture
def consumer(clock):
    return Consumer(Model(clock))


@pytest.fixture
def loads(consumer):
    return LoadSum(consumer, model=consumer.model)


def forecast(loads, engine, load, *, step=1, layer=0, error=0.0):
    loads._model.go_on(engine)
    loads.of(engine).forecast(
        step=step, layer=layer, load_E=np.array(load, dtype=float), expected_error=error
    )


def observe(loads, engine, load, *, step=1, layer=0):
    loads._model.go_on(engine)
    loads.of(engine).observe(step=step, layer=layer, load_E=np.array(load, dtype=float))


def test_one_engine_is_handed_through(loads, consumer):
    forecast(loads, 1, [3, 1], step=7, error=None)
    assert consumer.last == (1, "forecast", 7, 0, [3, 1])
    assert consumer.error is None
    observe(loads, 1, [2, 2], step=7)
    assert consumer.last == (1, "observe", 7, 0, [2, 2])


def test_plans_are_for_the_sum_under_the_step_of_the_engine_that_spoke(loads, consumer):
    forecast(loads, 1, [3, 1], step=7)
    forecast(loads, 2, [10, 0], step=90)
    assert consumer.last == (2, "forecast", 90, 0, [13, 1])
    forecast(loads, 1, [1, 1], step=8)
    assert consumer.last == (1, "forecast", 8, 0, [11, 1])
    assert consumer.model.speaker is None


def test_loads_of_other_layers_do_not_count(loads, consumer):
    forecast(loads, 1, [3, 1], layer=1)
    forecast(loads, 2, [10, 0], layer=0)
    assert consumer.last[-1] == [10, 0]


def test_the_newest_load_stands_in_where_another_engine_forecasts_nothing(loads, consumer):
    observe(loads, 1, [5, 5])
    forecast(loads, 2, [10, 0])
    assert consumer.last[-1] == [15, 5]
    observe(loads, 2, [8, 2])
    assert consumer.last[-1] == [13, 7]


def test_an_engine_that_stands_still_for_a_while_counts_no_more(loads, consumer, clock):
    forecast(loads, 1, [3, 1])
    clock.advance(2.9)
    forecast(loads, 2, [10, 0])
    assert consumer.last[-1] == [13, 1]
    clock.advance(0.2)
    forecast(loads, 2, [10, 0])
    assert consumer.last[-1] == [10, 0]
    forecast(loads, 1, [1, 1])
    assert consumer.last[-1] == [11, 1]


def test_an_engine_that_goes_on_without_a_word_counts(loads, consumer, clock):
    forecast(loads, 1, [3, 1])
    clock.advance(10.0)
    consumer.model.engines[1].step[0] = 12
    forecast(loads, 2, [10, 0])
    assert consumer.last[-1] == [13, 1]


def test_steps_of_all_engines_are_counted_together_also_of_those_that_left(loads, consumer):
    for engine, step in [(1, 5), (2, 40)]:
        consumer.model.engines[engine].step[0] = step
    forecast(loads, 1, [3, 1], step=6)
    assert consumer.step == 46
    loads.forget(2)
    del consumer.model.engines[2]
    forecast(loads, 1, [3, 1], step=7)
    assert consumer.step == 47
    assert consumer.last[2] == 7


def test_what_came_true_is_held_against_the_newest_forecast_that_has_it_in_it(loads, consumer):
    forecast(loads, 1, [3, 1], step=6)
    consumer.model.engines[1].step[0] = 6
    forecast(loads, 2, [3, 1], step=9)
    newest = consumer.step
    consumer.model.engines[2].step[0] = 9
    observe(loads, 1, [2, 2], step=6)
    assert consumer.step == newest
    assert consumer.last[:3] == (1, "observe", 6)


def test_an_engine_that_is_gone_counts_no_more(loads, consumer):
    forecast(loads, 1, [3, 1])
    loads.forget(1)
    del consumer.model.engines[1]
    forecast(loads, 2, [10, 0])
    assert consumer.last[-1] == [10, 0]


def test_errors_are_weighed_by_tokens_and_unknown_if_one_is(loads, consumer):
    forecast(loads, 1, [30, 0], error=0.1)
    forecast(loads, 2, [0, 10], error=0.5)
    assert consumer.error == pytest.approx(0.2)
    forecast(loads, 1, [30, 0], error=None)
    assert consumer.error is None
