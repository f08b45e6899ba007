"""What look-ahead predictors would have said."""

import numpy as np
import pytest

from fakes.replays import draw_trace, make_trace
from moeless.errors import ConfigError, TraceError
from moeless.simulator.forecasts import (
    ExactForecast,
    NoisyForecast,
    Prediction,
    build_forecast,
    parse_prediction,
)


@pytest.fixture
def trace():
    return draw_trace(steps=5)


@pytest.mark.parametrize(
    ("text", "distance", "expected"),
    [
        ("noisy:0.12", None, Prediction(kind="noisy", sigma=0.12, distance=1)),
        ("noisy:0", 3, Prediction(kind="noisy", sigma=0.0, distance=3)),
        ("exact", None, Prediction(kind="exact", distance=1)),
        ("previous", None, Prediction(kind="previous", distance=0)),
        ("ewma", None, Prediction(kind="ewma", distance=0)),
    ],
)
def test_predictions_are_read(trace, text, distance, expected):
    found = parse_prediction(text, distance=distance, trace=trace)
    assert found == expected
    assert parse_prediction(str(found), distance=distance, trace=trace) == found


@pytest.mark.parametrize(
    ("text", "distance", "part"),
    [
        ("gate", None, "noisy:SIGMA, exact, recorded, previous, ewma"),
        ("noisy", None, "unknown"),
        ("noisy:", None, "unknown"),
        ("noisy:a", None, "sigma"),
        ("noisy:-1", None, "sigma"),
        ("noisy:nan", None, "sigma"),
        ("noisy:inf", None, "sigma"),
        ("exact:1", None, "unknown"),
        ("exact", 0, "--distance is 0"),
        ("previous", 1, "previous looks back"),
    ],
)
def test_other_predictions_are_refused(trace, text, distance, part):
    with pytest.raises(ConfigError, match=part):
        parse_prediction(text, distance=distance, trace=trace)


def test_recorded_needs_a_recording_and_its_distance(trace):
    with pytest.raises(TraceError, match="no predicted loads"):
        parse_prediction("recorded", distance=None, trace=trace)
    loads = [[[2, 2], [1, 3]]]
    recorded = make_trace(loads, predicted=[[[1.5, 2.5], [0, 4]]])
    prediction = parse_prediction("recorded", distance=None, trace=recorded)
    assert prediction == Prediction(kind="recorded", distance=1)
    with pytest.raises(ConfigError, match="recorded at 1"):
        parse_prediction("recorded", distance=2, trace=recorded)
    forecast = build_forecast(prediction, recorded, seed=0)
    assert forecast.expected_LE(0).tolist() == [[1.5, 2.5], [0, 4]]


def test_kinds_that_look_back_forecast_nothing_and_name_their_history(trace):
    prediction = parse_prediction("ewma", distance=None, trace=trace)
    assert build_forecast(prediction, trace, seed=0) is None
    assert prediction.history == "ewma"
    assert parse_prediction("exact", distance=None, trace=trace).history == "previous"


def test_exact_is_what_comes_true(trace):
    assert (ExactForecast(trace.loads_NLE).expected_LE(3) == trace.loads_NLE[3]).all()


def test_noise_follows_its_formula(trace):
    forecast = NoisyForecast(trace.loads_NLE, sigma=0.3, seed=7)
    load_LE = trace.loads_NLE[2].astype(float)
    z_LE = np.random.default_rng((7, 2)).standard_normal(load_LE.shape)
    noisy_LE = load_LE * np.exp(0.3 * z_LE)
    expected_LE = noisy_LE * (load_LE.sum(axis=1) / noisy_LE.sum(axis=1))[:, None]
    np.testing.assert_allclose(forecast.expected_LE(2), expected_LE, rtol=1e-12)


def test_noise_depends_on_seed_and_step_alone(trace):
    forecast = NoisyForecast(trace.loads_NLE, sigma=0.3, seed=1)
    first = forecast.expected_LE(4)
    forecast.expected_LE(0)
    again = NoisyForecast(trace.loads_NLE, sigma=0.3, seed=1).expected_LE(4)
    other = NoisyForecast(trace.loads_NLE, sigma=0.3, seed=2).expected_LE(4)
    assert (first == again).all()
    assert (first == forecast.expected_LE(4)).all()
    assert (first != other).any()


def test_noise_keeps_sums_and_leaves_layers_without_tokens_alone():
    trace = make_trace([[[0, 0, 0], [0, 0, 0]], [[5, 0, 1], [2, 2, 2]]])
    forecast = NoisyForecast(trace.loads_NLE, sigma=1.0, seed=0)
    assert (forecast.expected_LE(0) == 0).all()
    np.testing.assert_allclose(forecast.expected_LE(1).sum(axis=1), [6, 6])
    assert forecast.expected_LE(1)[0, 1] == 0


def test_without_noise_it_is_exact(trace):
    forecast = NoisyForecast(trace.loads_NLE, sigma=0.0, seed=0)
    np.testing.assert_allclose(forecast.expected_LE(1), trace.loads_NLE[1])
