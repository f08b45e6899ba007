"""What engines share is counted once, whoever asks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.functions.accounts.usage_split import Usage, UsageSplit


def usage(pieces, amount):
    return Usage(pieces=np.array([pieces]), amounts=np.array([float(amount)]))


def test_amounts_go_by_the_time_that_instances_computed_and_pieces_to_who_had_most():
    split = UsageSplit(usage(5, 100))
    for engine in (1, 2):
        split.join(engine)
    split.settle(usage(8, 140), {1: 30, 2: 10})
    assert (split.of(1).pieces[0], split.of(2).pieces[0]) == (3, 0)
    assert (split.of(1).amounts[0], split.of(2).amounts[0]) == (30.0, 10.0)
    split.settle(usage(9, 150), {1: 30, 2: 11})
    assert (split.of(2).pieces[0], split.of(2).amounts[0]) == (1, 20.0)


def test_without_work_amounts_are_divided_equally_and_without_engines_they_are_nobodys():
    split = UsageSplit(usage(0, 0))
    split.settle(usage(2, 7), {})
    for engine in (1, 2):
        split.join(engine)
    split.settle(usage(2, 17), {1: 0, 2: 0})
    assert split.of(1).amounts[0] == split.of(2).amounts[0] == 5.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["work", "join", "leave"]), st.integers(0, 3), st.integers(0, 50)
        ),
        max_size=40,
    )
)
def test_nothing_is_counted_twice_or_never(actions):
    split, there = UsageSplit(usage(0, 0)), {}
    total = owed = 0
    gone = np.zeros(2)
    for action, engine, number in actions:
        if action == "work":
            total += number
            owed += number if there else 0
            for each in there:
                there[each] += number * (each == engine)
        split.settle(usage(total, total), there)
        if action == "join" and engine not in there:
            there[engine] = 0
            split.join(engine)
        if action == "leave" and engine in there:
            last = split.of(engine)
            gone += [last.pieces[0], last.amounts[0]]
            split.leave(engine)
            del there[engine]
    used = [split.of(engine) for engine in there]
    assert sum(u.pieces[0] for u in used) + gone[0] == owed
    assert sum(u.amounts[0] for u in used) + gone[1] == pytest.approx(owed)
