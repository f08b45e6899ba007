"""How long workers may take: more for more work, by what they have shown, and never for ever."""

from hypothesis import given
from hypothesis import strategies as st

from moeless.functions.invokers.patience import NOTED_FROM_NS, Patience, Work

SMALL, LARGE = 3 * 576 * 56, 3 * 4096 * 14336
"""Parameters of an expert of the demo model and of a Mixtral."""
MOST_S = 600.0
WORK = st.builds(Work, rows=st.integers(1, 1 << 20), experts=st.integers(1, 512))
BUSY_NS = st.integers(NOTED_FROM_NS, 10**12)


def patience(parameters=LARGE):
    return Patience(parameters, num_devices=2, most_s=MOST_S)


@given(WORK, WORK, st.lists(st.tuples(WORK, BUSY_NS), max_size=8))
def test_more_work_never_gets_less_time_and_none_more_than_the_bound(one, other, shown):
    patient = patience()
    for work, busy_ns in shown:
        patient.note(0, work, busy_ns)
    both = Work(rows=one.rows + other.rows, experts=max(one.experts, other.experts))
    assert 10.0 <= patient.allowed_s(0, one) <= patient.allowed_s(0, both) <= MOST_S


@given(st.lists(st.tuples(WORK, BUSY_NS), min_size=1, max_size=8), st.integers(0, 7))
def test_what_took_a_device_some_time_once_may_take_it_much_longer(shown, which):
    patient = patience()
    for work, busy_ns in shown:
        patient.note(1, work, busy_ns)
    work, busy_ns = shown[-1]
    assert patient.allowed_s(1, work) >= min(MOST_S, 10 * busy_ns * 1e-9)


def test_little_work_gets_ten_seconds_or_so_on_any_device():
    assert patience(SMALL).allowed_s(0, Work(rows=8, experts=8)) < 11


def test_a_long_prompt_gets_minutes_on_a_device_that_has_shown_nothing():
    assert patience().allowed_s(0, Work(rows=512, experts=8)) == MOST_S


def test_a_fast_device_that_is_stuck_is_found_sooner_than_a_slow_one():
    patient, work = patience(), Work(rows=512, experts=8)
    patient.note(0, work, 10**8)
    patient.note(1, work, 10**10)
    assert patient.allowed_s(0, work) < 15 < 200 < patient.allowed_s(1, work)


def test_a_slow_moment_counts_at_once_and_is_forgotten_in_time():
    patient, work = patience(), Work(rows=512, experts=8)
    patient.note(0, work, 10**8)
    patient.note(0, work, 10**10)
    assert patient.allowed_s(0, work) > 200
    for _ in range(200):
        patient.note(0, work, 10**8)
    assert patient.allowed_s(0, work) < 15
