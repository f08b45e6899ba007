import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.core.model import FunctionId
from moeless.errors import ConfigError
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.policies.keep_alive.histogram import HistogramKeepAlive

FUNCTION = FunctionId("m", 0, 0)


@pytest.mark.parametrize("seconds", [0.0, 2.5, math.inf])
def test_every_function_is_kept_for_the_same_time(seconds):
    rule = FixedKeepAlive(seconds)
    assert rule.keep_s(FUNCTION, idle_s=0.0) == seconds
    assert rule.keep_s(FunctionId("m", 3, 1), idle_s=100.0) == seconds


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_duration_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match="not a duration"):
        FixedKeepAlive(seconds)


def use_after(rule, pauses_s, *, function=FUNCTION, from_s=0.0):
    """Use a function, and again after each pause; returns the time of the last use."""
    at_s = from_s
    rule.used(function, at_s=at_s)
    for pause_s in pauses_s:
        at_s += pause_s
        rule.used(function, at_s=at_s)
    return at_s


def test_a_function_is_kept_over_the_pauses_that_it_makes():
    rule = HistogramKeepAlive(300.0)
    use_after(rule, [20.0] * 30)
    kept_s = rule.keep_s(FUNCTION, idle_s=0.0)
    assert 20.0 < kept_s < 20.0 * 2**0.25 * 1.1 + 1e-6


def test_rare_long_pauses_do_not_count():
    rule = HistogramKeepAlive(300.0, coverage=0.9)
    use_after(rule, ([5.0] * 19 + [900.0]) * 3)
    assert rule.keep_s(FUNCTION, idle_s=0.0) < 10.0


def test_each_function_has_pauses_of_its_own():
    rule, other = HistogramKeepAlive(300.0), FunctionId("m", 0, 1)
    use_after(rule, [10.0] * 10)
    use_after(rule, [100.0] * 10, function=other)
    assert rule.keep_s(FUNCTION, idle_s=0.0) < 20.0 < 100.0 < rule.keep_s(other, idle_s=0.0)
    assert rule.keep_s(FunctionId("m", 0, 2), idle_s=0.0) == 300.0


def test_until_there_are_enough_pauses_the_given_time_holds():
    rule = HistogramKeepAlive(77.0, least_pauses=5)
    at_s = use_after(rule, [10.0] * 4)
    assert rule.keep_s(FUNCTION, idle_s=0.0) == 77.0
    rule.used(FUNCTION, at_s=at_s + 10.0)
    assert rule.keep_s(FUNCTION, idle_s=0.0) < 20.0


def test_steps_of_one_burst_are_no_pauses():
    rule = HistogramKeepAlive(77.0)
    use_after(rule, [0.05] * 1000)
    assert rule.keep_s(FUNCTION, idle_s=0.0) == 77.0


def test_a_function_that_mostly_pauses_for_longer_than_any_keep_alive_is_not_kept_for_it():
    rule = HistogramKeepAlive(30.0, longest_s=600.0)
    use_after(rule, [10.0] * 4 + [7200.0] * 6)
    assert rule.keep_s(FUNCTION, idle_s=0.0) == 30.0


def test_replicas_may_be_reported_in_any_order():
    rule, same = HistogramKeepAlive(300.0), HistogramKeepAlive(300.0)
    for step in range(20):
        for at_s in (30.0 * step + 0.2, 30.0 * step, 30.0 * step + 0.1):
            rule.used(FUNCTION, at_s=at_s)
        same.used(FUNCTION, at_s=30.0 * step + 0.2)
    assert rule.keep_s(FUNCTION, idle_s=0.0) == same.keep_s(FUNCTION, idle_s=0.0)


@given(
    pauses_s=st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60),
    coverage=st.floats(0.05, 1.0),
)
def test_what_is_kept_covers_what_was_asked_and_is_never_longer_than_the_longest(
    pauses_s, coverage
):
    rule = HistogramKeepAlive(300.0, longest_s=3600.0, coverage=coverage)
    use_after(rule, pauses_s)
    kept_s = rule.keep_s(FUNCTION, idle_s=0.0)
    assert kept_s == 300.0 or kept_s <= 3600.0
    if kept_s not in (300.0, 3600.0):
        covered = sum(pause_s <= kept_s * (1 + 1e-9) for pause_s in pauses_s)
        assert covered >= coverage * len(pauses_s) - 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"seconds": -1.0},
        {"seconds": 300.0, "coverage": 0.0},
        {"seconds": 300.0, "longest_s": math.nan},
        {"seconds": 300.0, "margin": -0.1},
        {"seconds": 300.0, "least_pauses": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        HistogramKeepAlive(**options)
