"""How often a layer is looked at whose plan would stay the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.control.pace import Pace

LAYERS = 8


def settle(pace, *, step_s, decision_s, steps=400):
    for step in range(1, steps):
        for layer in range(LAYERS):
            pace.note_step(layer, step=step, now_s=step * step_s)
            pace.note_decision(decision_s)
    return steps


def periods(pace, layer, first):
    """Steps between looks at a layer, for some looks from a step on."""
    step, found = first, []
    for _ in range(5):
        steps = pace.steps(layer, step=step)
        found.append(steps)
        step += steps
    return found[1:]


def test_nothing_is_known_at_first_so_every_step_is_looked_at():
    pace = Pace(LAYERS, share=0.01)
    assert [pace.steps(layer, step=1) for layer in range(LAYERS)] == [1] * LAYERS


@given(step_s=st.floats(1e-3, 0.2), decision_s=st.floats(0, 1e-3), share=st.floats(0.005, 0.5))
def test_deciding_takes_its_share_of_the_time_and_not_less_than_it_may(step_s, decision_s, share):
    pace = Pace(LAYERS, share=share)
    first = settle(pace, step_s=step_s, decision_s=decision_s)
    (period,) = set(periods(pace, 3, first))
    spent_s = 2 * LAYERS * decision_s
    assert 1 <= period <= 64
    if period < 64:
        assert spent_s / (period * step_s) <= share * 1.01
    if period > 1:
        assert spent_s / ((period - 1) * step_s) >= share * 0.99


def test_layers_are_looked_at_in_different_steps():
    pace = Pace(LAYERS, share=0.01)
    first = settle(pace, step_s=0.01, decision_s=5e-5)
    looks = [first + pace.steps(layer, step=first) for layer in range(LAYERS)]
    assert len(set(looks)) == LAYERS
    assert {period for layer in range(LAYERS) for period in periods(pace, layer, first)} == {8}


def test_free_decisions_are_made_in_every_step():
    pace = Pace(LAYERS, share=0.01)
    first = settle(pace, step_s=0.01, decision_s=0.0)
    assert periods(pace, 0, first) == [1] * 4


def test_a_pause_between_two_requests_is_not_taken_for_a_slow_step():
    pace = Pace(LAYERS, share=0.01)
    first = settle(pace, step_s=0.01, decision_s=5e-5)
    before = periods(pace, 0, first)
    for layer in range(LAYERS):
        pace.note_step(layer, step=first, now_s=first * 0.01 + 3600)
    after = periods(pace, 0, first)
    assert 1 <= after[0] <= before[0] == 8
    for step in range(first + 1, first + 200):
        pace.note_step(0, step=step, now_s=step * 0.01 + 3600)
    assert periods(pace, 0, first) == pytest.approx(before, abs=1)


def test_a_step_that_is_noted_twice_counts_once():
    pace, other = Pace(LAYERS, share=0.01), Pace(LAYERS, share=0.01)
    for each, times in ((pace, 1), (other, 3)):
        for step in range(1, 100):
            each.note_decision(5e-5)
            for _ in range(times):
                each.note_step(0, step=step, now_s=step * 0.01)
    assert periods(pace, 0, 100) == periods(other, 0, 100)
