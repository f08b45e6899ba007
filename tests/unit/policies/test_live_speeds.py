"""A device that has become slow gets less, and as much as before once it has recovered."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.layer_cost import LayerCost
from moeless.policies.splitters.device_speeds import DeviceSpeeds
from moeless.policies.splitters.live_speeds import LiveSpeedSplitter
from moeless.policies.splitters.min_time import MinTimeSplitter

COST = LayerCost(base_s=5e-5, touch_s=2e-5, token_s=1e-6)
EVERYWHERE = np.ones((8, 3), dtype=bool)


def splitter():
    return LiveSpeedSplitter(MinTimeSplitter, COST, note_every=1)


def serve(split, slowness_D, *, layers=600, seed=0, noise=0.3):
    """Layers whose devices take so many times as long as the model says, with noise."""
    chance = np.random.default_rng(seed)
    shares_D = np.zeros(3)
    for _ in range(layers):
        count_E = chance.integers(0, 40, 8)
        tokens_ED = split.split(count_E, EVERYWHERE)
        assert (tokens_ED.sum(axis=1) == count_E).all()
        busy_s_D = COST.device_s(tokens_ED) * slowness_D
        busy_s_D *= np.exp(chance.normal(0.0, noise, 3))
        split.note_work(tokens_ED, (busy_s_D * 1e9).astype(np.int64))
        shares_D += tokens_ED.sum(axis=0)
    return shares_D / shares_D.sum()


def test_equal_devices_stay_equal_whatever_the_model_is_wrong_by():
    split = splitter()
    share_D = serve(split, np.array([7.0, 7.0, 7.0]))
    assert (split.speed_D() == 1.0).all()
    assert share_D == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.4])
def test_a_little_slower_or_faster_makes_no_difference(factor):
    split = splitter()
    serve(split, np.array([1.0, factor, 1.0]))
    assert (split.speed_D() == 1.0).all()


def test_a_device_that_is_much_slower_gets_less_and_recovers():
    split = splitter()
    before_D = serve(split, np.ones(3))
    serve(split, np.array([1.0, 1.0, 4.0]), layers=1500, seed=1)
    assert split.speed_D()[2] == pytest.approx(0.25, rel=0.3)
    slow_D = serve(split, np.array([1.0, 1.0, 4.0]), seed=2)
    assert 0 < slow_D[2] < 0.5 * before_D[2]
    serve(split, np.ones(3), layers=6000, seed=3)
    assert (split.speed_D() == 1.0).all()
    assert serve(split, np.ones(3), seed=4)[2] == pytest.approx(before_D[2], abs=0.05)


def test_one_long_pause_is_no_slowness():
    split = splitter()
    serve(split, np.ones(3))
    tokens_ED = split.split(np.full(8, 20), EVERYWHERE)
    busy_ns_D = (COST.device_s(tokens_ED) * 1e9).astype(np.int64)
    busy_ns_D[1] = 30_000_000_000
    split.note_work(tokens_ED, busy_ns_D)
    serve(split, np.ones(3), layers=100, seed=5)
    assert (split.speed_D() == 1.0).all()


def test_what_is_slow_at_first_only_is_not_held_against_a_device():
    split = splitter()
    serve(split, np.array([500.0, 1.0, 1.0]), layers=50)
    serve(split, np.ones(3), layers=1000)
    assert (split.speed_D() == 1.0).all()


def test_a_slow_device_that_gets_nothing_at_all_is_tried_again_in_the_end():
    speeds = DeviceSpeeds(COST, 2)
    both, first = np.full((4, 2), 10), np.array([[10, 0]] * 4)
    for _ in range(1000):
        speeds.note(both, (COST.device_s(both) * [1e9, 5e9]).astype(np.int64))
    assert speeds.speed_D[1] == pytest.approx(0.2, rel=0.3)
    for _ in range(2200):
        speeds.note(first, (COST.device_s(first) * 1e9).astype(np.int64))
    assert (speeds.speed_D == 1.0).all()


def test_speeds_known_beforehand_are_kept_and_multiplied():
    cost = LayerCost(token_s=1e-6, speeds=(1.0, 0.5))
    speeds = DeviceSpeeds(cost, 2)
    tokens_ED = np.full((4, 2), 10)
    for _ in range(1000):
        speeds.note(tokens_ED, (cost.device_s(tokens_ED) * 1e9).astype(np.int64))
    assert speeds.cost_now().speeds == (1.0, 0.5)
    for _ in range(2000):
        speeds.note(tokens_ED, (cost.device_s(tokens_ED) * [1e9, 3e9]).astype(np.int64))
    assert speeds.cost_now().speeds[1] == pytest.approx(0.5 / 3, rel=0.3)


@drawn(30)
@given(
    slowness=st.lists(st.floats(0.05, 50.0), min_size=3, max_size=3),
    noise=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**16),
)
def test_every_token_is_split_and_no_device_is_taken_for_dead(slowness, noise, seed):
    split = splitter()
    serve(split, np.array(slowness), layers=300, seed=seed, noise=noise)
    speed_D = split.speed_D()
    assert ((speed_D >= 0.125) & (speed_D <= 1.0)).all()
    assert np.count_nonzero(speed_D == 1.0) >= 1
