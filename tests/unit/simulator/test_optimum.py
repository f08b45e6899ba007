"""The optimum of small cases, against every split there is."""

import itertools

import numpy as np
import pytest

from moeless.core.layer_cost import LayerCost
from moeless.errors import PlanError
from moeless.simulator.optimum import least_time, least_tokens

TOKENS_ONLY = LayerCost(token_s=1e-6, transfer_s=1e-7, base_s=1e-4)
WITH_TOUCH = LayerCost(token_s=1.0, touch_s=5.0, transfer_s=0.5, base_s=3.0)


def every_share(count, replicas):
    """All ways to divide the tokens."""
    rows = []
    for tokens, seats in zip(count, replicas, strict=True):
        devices = np.flatnonzero(seats)
        rows.append(
            [
                [split[list(devices).index(d)] if d in devices else 0 for d in range(len(seats))]
                for split in itertools.product(range(tokens + 1), repeat=len(devices))
                if sum(split) == tokens
            ]
        )
    return (np.array(share) for share in itertools.product(*rows))


@pytest.fixture(scope="module")
def small_cases():
    rng = np.random.default_rng(3)
    cases = []
    for _ in range(25):
        experts, devices = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        replicas = (rng.random((experts, devices)) < 0.6).astype(np.uint8)
        replicas[~replicas.any(axis=1), 0] = 1
        cases.append((rng.integers(0, 7, size=experts), replicas))
    return cases


def test_no_division_of_tokens_has_a_less_full_device(small_cases):
    for count, replicas in small_cases:
        best = min(share.sum(axis=0).max() for share in every_share(count, replicas))
        assert least_tokens(count, replicas) == best


@pytest.mark.parametrize("cost", [TOKENS_ONLY, WITH_TOUCH])
def test_no_division_of_tokens_takes_less_time(small_cases, cost):
    for count, replicas in small_cases:
        best = min(cost.layer_s(share) for share in every_share(count, replicas))
        assert least_time(count, replicas, cost) == pytest.approx(best, rel=2e-3)


def test_without_tokens_nothing_takes_time():
    nothing, replicas = np.zeros(2, dtype=np.int64), np.zeros((2, 2), dtype=np.uint8)
    assert least_tokens(nothing, replicas) == 0
    assert least_time(nothing, replicas, WITH_TOUCH) == 0.0


def test_several_copies_on_a_device_are_one_place_to_run():
    count = np.array([10, 4])
    copies = np.array([[3, 1], [0, 2]], dtype=np.uint8)
    assert least_tokens(count, copies) == least_tokens(count, copies > 0) == 7


def test_whole_tokens_are_kept_of_counts_of_any_size():
    replicas = np.ones((1, 3), dtype=bool)
    for count in (1, 2, 3, 10**6 + 1, 3 * 10**9, 3 * 10**9 + 1):
        assert least_tokens(np.array([count]), replicas) == -(-count // 3)


@pytest.mark.parametrize("cost", [TOKENS_ONLY, WITH_TOUCH])
def test_an_expert_without_a_replica_is_named(cost):
    with pytest.raises(PlanError, match="expert 1: 4 tokens but no replica"):
        least_time(np.array([2, 4]), np.array([[1], [0]], dtype=np.uint8), cost)


def test_what_is_not_solved_in_time_has_no_optimum():
    rng = np.random.default_rng(0)
    count, replicas = rng.integers(50, 5000, size=40), np.ones((40, 8), dtype=np.uint8)
    assert least_time(count, replicas, WITH_TOUCH, limit_s=0.0) is None
