import numpy as np
import pytest

pytest.importorskip("torch")

from moeless_experiments.studies.adjustments import ADJUSTMENTS, correct_online, mix_history


def steady(steps=40, seed=0):
    """Loads that hardly change, and a look-ahead with a lasting bias [N, 1, 4]."""
    generator = np.random.default_rng(seed)
    actual = np.array([40.0, 30.0, 20.0, 10.0]) + generator.normal(0, 0.5, (steps, 1, 4))
    expected = np.full((steps, 1, 4), 25.0)
    return expected, actual


@pytest.mark.parametrize("name", list(ADJUSTMENTS))
def test_a_lasting_error_of_the_look_ahead_becomes_smaller(name):
    expected, actual = steady()
    adjusted = ADJUSTMENTS[name](expected, actual)
    before, after = (np.abs(loads - actual)[20:].mean() for loads in (expected, adjusted))
    assert after < 0.7 * before


@pytest.mark.parametrize("adjust", [mix_history, correct_online])
def test_no_batch_is_adjusted_by_what_came_after_it(adjust):
    expected, actual = steady()
    other = actual.copy()
    other[20:] = other[20:, :, ::-1]
    # What is known before batch 21 is the same but for batch 20 itself.
    assert np.array_equal(adjust(expected, actual)[:21], adjust(expected, other)[:21])


def test_the_first_batch_is_taken_as_it_is():
    expected, actual = steady()
    for adjust in ADJUSTMENTS.values():
        assert np.array_equal(adjust(expected, actual)[0], expected[0])
