import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.errors import ConfigError, PlanError
from moeless.policies.predictors import PREDICTORS
from moeless.policies.predictors.window import WindowPredictor


@pytest.fixture
def clock():
    return ManualClock()


def observe(predictor, *load, layer=0):
    predictor.observe(step=0, layer=layer, load_E=np.array(load, dtype=np.float64))


def predict(predictor, layer=0):
    load = predictor.predict(step=1, layer=layer)
    return None if load is None else load.tolist()


def test_the_registry_makes_it_with_a_clock(clock):
    assert isinstance(PREDICTORS.create("window", clock=clock, window_s=60), WindowPredictor)


def test_nothing_is_predicted_before_the_first_observation(clock):
    assert predict(WindowPredictor(clock)) is None


def test_loads_of_a_layer_add_up_over_the_window(clock):
    predictor = WindowPredictor(clock, window_s=60)
    observe(predictor, 1, 2)
    observe(predictor, 10, 0)
    clock.advance(30)
    observe(predictor, 100, 1)
    observe(predictor, 7, 7, layer=1)
    assert predict(predictor) == [111, 3]
    assert predict(predictor, layer=1) == [7, 7]


def test_what_is_older_than_the_window_no_longer_counts(clock):
    predictor = WindowPredictor(clock, window_s=60)
    observe(predictor, 1, 2)
    clock.advance(30)
    observe(predictor, 10, 20)
    clock.advance(29)
    assert predict(predictor) == [11, 22]
    clock.advance(1)
    assert predict(predictor) == [10, 20]
    clock.advance(30)
    assert predict(predictor) is None


def test_memory_does_not_grow_with_the_number_of_observations(clock):
    predictor = WindowPredictor(clock, window_s=60)
    for _ in range(1000):
        observe(predictor, 1, 0)
        clock.advance(0.125)
    (window,) = predictor._windows.values()
    assert len(window._buckets) <= 60
    # 125 s now, so that the buckets from 66 s on count: 59 s of eight a second.
    assert predict(predictor) == [472, 0]


def test_a_prediction_survives_later_observations(clock):
    predictor = WindowPredictor(clock)
    load = np.array([1.0, 2.0])
    predictor.observe(step=0, layer=0, load_E=load)
    before = predictor.predict(step=1, layer=0)
    load[0] = 99.0
    observe(predictor, 5, 5)
    assert before.tolist() == [1, 2]
    assert not before.flags.writeable
    assert predict(predictor) == [6, 7]


def test_an_impossible_load_is_refused_with_layer_and_expert(clock):
    with pytest.raises(PlanError, match="layer 3, expert 1"):
        observe(WindowPredictor(clock), 1, np.nan, layer=3)


def test_another_number_of_experts_is_refused(clock):
    predictor = WindowPredictor(clock)
    observe(predictor, 1, 1)
    with pytest.raises(PlanError, match="3 experts after loads of 2"):
        observe(predictor, 1, 1, 1)


@pytest.mark.parametrize("window_s", [0.0, -1.0, np.nan, np.inf])
def test_a_window_out_of_range_is_refused(clock, window_s):
    with pytest.raises(ConfigError, match="window_s"):
        WindowPredictor(clock, window_s=window_s)
