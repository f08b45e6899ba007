"""Figures of merit, on loads small enough to work out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moeless.learned.accuracy import load_accuracies, load_accuracy
from moeless.learned.metrics import recalled, score_loads, token_recall

LOADS = arrays(np.int64, (4, 3, 5), elements=st.integers(0, 50))


@given(LOADS, LOADS)
def test_accuracies_of_many_batches_are_those_of_each(predicted, actual):
    many = load_accuracies(predicted, actual)
    assert many.shape == (4, 3)
    for index in np.ndindex(4, 3):
        assert many[index] == load_accuracy(predicted[index], actual[index])


@given(LOADS)
def test_a_perfect_prediction_has_perfect_figures(actual):
    scores = score_loads(actual, actual)
    if not actual.any():
        assert scores is None
        return
    assert scores.load_accuracy == scores.hot_hit_rate == 1.0
    assert scores.max_load_error == scores.error_p90 == 0.0
    assert scores.batches == (actual.sum(axis=-1) > 0).sum()


def test_figures_of_a_wrong_prediction():
    scores = score_loads([[6, 2, 0], [0, 4, 4]], [[4, 4, 0], [0, 8, 0]])
    assert scores.load_accuracy == pytest.approx((0.75 + 0.5) / 2)
    assert scores.hot_hit_rate == 1.0  # the first batch has two hottest experts
    assert scores.max_load_error == pytest.approx((0.5 + 0.5) / 2)
    assert 0.0 < scores.pearson_r < 1.0


def test_the_hottest_expert_is_missed():
    assert score_loads([[0, 4]], [[3, 1]]).hot_hit_rate == 0.0


def test_loads_that_do_not_vary_do_not_correlate():
    assert score_loads([[2, 2]], [[2, 2]]).pearson_r == 0.0


def test_batches_without_tokens_are_left_out():
    assert score_loads([[1, 1], [3, 1]], [[0, 0], [3, 1]]).batches == 1


def test_recall_is_the_share_of_experts_found_whatever_their_order():
    assert token_recall([[1, 2], [3, 4]], [[2, 1], [4, 5]]) == 0.75
    assert recalled([[1, 2]], [[2, 1]]) == 2
    assert token_recall(np.empty((0, 2)), np.empty((0, 2))) == 1.0


@pytest.mark.parametrize("function", [token_recall, score_loads])
def test_other_shapes_are_refused(function):
    with pytest.raises(ValueError, match="true ones"):
        function([[1, 2]], [[1, 2, 3]])
