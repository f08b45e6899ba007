import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeless.policies.splitters.even import EvenSplitter


@st.composite
def cases(draw):
    experts, devices = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    counts = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 2**40))
    count = np.array(draw(st.lists(counts, min_size=experts, max_size=experts)), dtype=np.int64)
    cells = draw(st.lists(st.booleans(), min_size=experts * devices, max_size=experts * devices))
    replicas = np.array(cells, dtype=bool).reshape(experts, devices)
    replicas[(count > 0) & ~replicas.any(axis=1), draw(st.integers(0, devices - 1))] = True
    return count, replicas


@given(cases())
def test_every_token_is_given_to_exactly_one_usable_replica(case):
    count, replicas = case
    share = EvenSplitter().split(count, replicas)
    assert share.dtype == np.int64
    assert share.shape == replicas.shape
    assert (share >= 0).all()
    assert (share.sum(axis=1) == count).all()
    assert (share[~replicas] == 0).all()


@given(cases())
def test_shares_of_one_expert_differ_by_at_most_one_token(case):
    count, replicas = case
    share = EvenSplitter().split(count, replicas)
    for row, usable in zip(share, replicas, strict=True):
        if usable.any():
            assert row[usable].max() - row[usable].min() <= 1


@given(cases())
def test_splitting_is_repeatable_and_leaves_its_input_alone(case):
    count, replicas = case
    before = count.copy(), replicas.copy()
    first, second = EvenSplitter().split(count, replicas), EvenSplitter().split(count, replicas)
    assert (first == second).all()
    assert (count == before[0]).all()
    assert (replicas == before[1]).all()


@given(st.integers(1, 16), st.integers(1, 8), st.integers(0, 100))
def test_left_over_tokens_spread_over_all_devices(experts, devices, each):
    share = EvenSplitter().split(
        np.full(experts, each, dtype=np.int64), np.ones((experts, devices), dtype=bool)
    )
    tokens = share.sum(axis=0)
    assert tokens.max() - tokens.min() <= 1
