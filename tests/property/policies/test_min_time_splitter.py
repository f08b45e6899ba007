import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.core.layer_cost import LayerCost
from moeless.errors import PlanError
from moeless.policies.splitters.min_time import MinTimeSplitter
from moeless.simulator.optimum import least_time, least_tokens

TOKENS_ONLY = LayerCost(token_s=1e-6)
H200_LIKE = LayerCost(base_s=65e-6, touch_s=72e-6, token_s=0.637e-6)


@st.composite
def cases(draw, most_tokens=2**40):
    experts, devices = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    counts = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, most_tokens))
    count = np.array(draw(st.lists(counts, min_size=experts, max_size=experts)), dtype=np.int64)
    cells = draw(st.lists(st.booleans(), min_size=experts * devices, max_size=experts * devices))
    replicas = np.array(cells, dtype=bool).reshape(experts, devices)
    replicas[(count > 0) & ~replicas.any(axis=1), draw(st.integers(0, devices - 1))] = True
    return count, replicas


costs = st.sampled_from([TOKENS_ONLY, H200_LIKE, LayerCost(touch_s=1.0, token_s=1e-9)])


def slowest(share, touch):
    return (touch * np.count_nonzero(share, axis=0) + share.sum(axis=0)).max()


@given(cases(), costs)
def test_every_token_is_given_to_exactly_one_usable_replica(case, cost):
    count, replicas = case
    share = MinTimeSplitter(cost).split(count, replicas)
    assert share.dtype == np.int64
    assert (share >= 0).all()
    assert (share.sum(axis=1) == count).all()
    assert (share[~replicas] == 0).all()


@given(cases(), costs)
def test_splitting_is_repeatable_and_leaves_its_input_alone(case, cost):
    count, replicas = case
    before = count.copy(), replicas.copy()
    used = MinTimeSplitter(cost)
    used.split(count[::-1].copy(), replicas[::-1].copy())
    assert (used.split(count, replicas) == MinTimeSplitter(cost).split(count, replicas)).all()
    assert (count == before[0]).all()
    assert (replicas == before[1]).all()


@given(cases(most_tokens=20_000))
def test_where_touching_is_free_the_fullest_device_has_the_linear_optimum(case):
    count, replicas = case
    if not count.any():
        return
    share = MinTimeSplitter(TOKENS_ONLY).split(count, replicas)
    assert share.sum(axis=0).max() == least_tokens(count, replicas)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_matter(case, random):
    count, replicas = case
    order = list(range(replicas.shape[1]))
    random.shuffle(order)
    splitter = MinTimeSplitter(TOKENS_ONLY)
    there = splitter.split(count, replicas).sum(axis=0).max()
    here = splitter.split(count, np.ascontiguousarray(replicas[:, order])).sum(axis=0).max()
    assert there == here


@given(cases(most_tokens=20_000))
def test_one_more_replica_never_makes_the_fullest_device_fuller(case):
    count, replicas = case
    splitter = MinTimeSplitter(TOKENS_ONLY)
    before = splitter.split(count, replicas).sum(axis=0).max()
    more = replicas.copy()
    more[0, 0] = True
    assert splitter.split(count, more).sum(axis=0).max() <= before


def test_where_touching_costs_small_cases_are_within_two_percent_of_the_optimum():
    random = np.random.default_rng(11)
    solved = 0
    for _ in range(150):
        devices, experts = int(random.integers(2, 5)), int(random.integers(2, 9))
        replicas = random.random((experts, devices)) < random.uniform(0.2, 0.9)
        replicas[~replicas.any(axis=1), 0] = True
        load = 10 ** random.uniform(0.5, 4)
        count = random.multinomial(int(load), random.dirichlet(np.full(experts, 1.0)))
        touch = float(random.choice([10, 50, 113, 500]))
        cost = LayerCost(touch_s=touch, token_s=1.0)
        best = least_time(count, replicas, cost, limit_s=10.0)
        if best is None:
            continue
        solved += 1
        share = MinTimeSplitter(cost).split(count.astype(np.int64), replicas)
        assert slowest(share, touch) <= 1.02 * best + 1e-6, (count, replicas, touch)
    assert solved > 100


def test_a_small_batch_is_not_split_at_all():
    count = np.array([6, 2, 2, 2], dtype=np.int64)
    replicas = np.ones((4, 4), dtype=bool)
    share = MinTimeSplitter(H200_LIKE).split(count, replicas)
    assert (np.count_nonzero(share, axis=1) == 1).all()
    assert (np.count_nonzero(share, axis=0) == 1).all()


def test_a_large_batch_is_split():
    count = np.array([60_000, 20_000, 20_000, 20_000], dtype=np.int64)
    share = MinTimeSplitter(H200_LIKE).split(count, np.ones((4, 4), dtype=bool))
    assert share.sum(axis=0).max() < 31_000


def test_an_expert_without_a_replica_is_named():
    with pytest.raises(PlanError, match=r"expert 1: 5 tokens but no usable replica"):
        MinTimeSplitter(TOKENS_ONLY).split(
            np.array([1, 5], dtype=np.int64), np.array([[True], [False]])
        )


def test_a_negative_count_is_named():
    with pytest.raises(PlanError, match=r"expert 0: -1 tokens"):
        MinTimeSplitter(TOKENS_ONLY).split(np.array([-1], dtype=np.int64), np.array([[True]]))
