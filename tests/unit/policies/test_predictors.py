import numpy as np
import pytest

from moeless.errors import ConfigError, PlanError
from moeless.policies.predictors.ewma import EwmaPredictor
from moeless.policies.predictors.previous import PreviousPredictor


@pytest.mark.parametrize("predictor", [PreviousPredictor(), EwmaPredictor()])
def test_nothing_is_predicted_before_the_first_observation(predictor):
    assert predictor.predict(step=0, layer=0) is None


def test_previous_repeats_the_last_load_of_the_same_layer():
    predictor = PreviousPredictor()
    predictor.observe(step=0, layer=0, load_E=np.array([1.0, 2.0]))
    predictor.observe(step=0, layer=1, load_E=np.array([5.0, 0.0]))
    predictor.observe(step=1, layer=0, load_E=np.array([3.0, 4.0]))
    assert predictor.predict(step=2, layer=0).tolist() == [3.0, 4.0]
    assert predictor.predict(step=2, layer=1).tolist() == [5.0, 0.0]


def test_ewma_starts_at_the_first_load_and_moves_by_alpha():
    predictor = EwmaPredictor(alpha=0.25)
    predictor.observe(step=0, layer=0, load_E=np.array([8.0, 0.0]))
    assert predictor.predict(step=1, layer=0).tolist() == [8.0, 0.0]
    predictor.observe(step=1, layer=0, load_E=np.array([0.0, 8.0]))
    assert predictor.predict(step=2, layer=0).tolist() == [6.0, 2.0]


@pytest.mark.parametrize("predictor", [PreviousPredictor(), EwmaPredictor()])
def test_a_prediction_survives_changes_to_the_observed_array(predictor):
    load = np.array([1.0, 2.0])
    predictor.observe(step=0, layer=0, load_E=load)
    load[0] = 99.0
    assert predictor.predict(step=1, layer=0).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("predictor", [PreviousPredictor(), EwmaPredictor()])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_impossible_load_is_refused_with_layer_and_expert(predictor, bad):
    with pytest.raises(PlanError, match="layer 3, expert 1"):
        predictor.observe(step=0, layer=3, load_E=np.array([1.0, bad]))


def test_ewma_refuses_another_number_of_experts():
    predictor = EwmaPredictor()
    predictor.observe(step=0, layer=0, load_E=np.ones(4))
    with pytest.raises(PlanError, match="8 experts after loads of 4"):
        predictor.observe(step=1, layer=0, load_E=np.ones(8))


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_ewma_refuses_an_alpha_out_of_range(alpha):
    with pytest.raises(ConfigError, match="alpha"):
        EwmaPredictor(alpha=alpha)
