"""What plans heed of measured speeds: what is clear, lasts and is not noise."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.layer_cost import LayerCost
from moeless.functions.platform.heeded_speeds import LASTS_S, HeededSpeeds
from moeless.policies.splitters.live_speeds import LiveSpeedSplitter
from moeless.policies.splitters.min_time import MinTimeSplitter

LOOK_S = 0.25
EQUAL = [1.0, 1.0, 1.0]
SLOW = [1.0, 1.0, 0.25]


class Watch:
    """Looks every quarter of a second, and counts how often other speeds came into force."""

    def __init__(self, num_devices=3):
        self.heeded = HeededSpeeds(num_devices)
        self.now_s = 0.0
        self.changes = 0

    def hear(self, *said, seconds):
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            self.changes += self.heeded.hear(np.array(said, dtype=float), now_s=self.now_s)
        return self

    @property
    def speeds(self):
        return self.heeded.speed_D.tolist()


@pytest.mark.parametrize(("speed", "patience"), [(0.125, 1), (0.25, 2), (0.5, 3)])
def test_a_slow_device_is_heeded_once_that_has_lasted_and_not_before(speed, patience):
    slow = [1.0, 1.0, speed]
    watch = Watch().hear(slow, seconds=patience * LASTS_S - 1)
    assert watch.speeds == EQUAL
    assert watch.hear(slow, seconds=2).speeds == slow


def test_a_device_that_has_recovered_is_as_good_as_before():
    watch = Watch().hear(SLOW, seconds=30).hear(EQUAL, seconds=2 * LASTS_S - 1)
    assert watch.speeds == SLOW
    assert watch.hear(EQUAL, seconds=2).speeds == EQUAL
    assert watch.changes == 2


@pytest.mark.parametrize("speed", [0.6, 0.7, 0.8, 1.0])
def test_speeds_close_to_each_other_count_as_equal(speed):
    assert Watch().hear([1.0, speed, 1.0], seconds=600).speeds == EQUAL


def test_what_comes_and_goes_is_not_heeded():
    watch = Watch()
    for _ in range(50):
        watch.hear(SLOW, seconds=15).hear(EQUAL, seconds=16)
    assert watch.changes == 0


def test_speeds_in_force_are_few():
    for speed in np.linspace(0.01, 1.0, 60):
        heeded = Watch().hear([1.0, 1.0, speed], seconds=40).speeds[2]
        assert heeded in (0.125, 0.25, 0.5, 1.0)
        assert heeded == 1.0 or 0.5 < heeded / max(speed, 0.125) < 2.0


def test_one_engine_does_not_outvote_another_and_two_do():
    assert Watch().hear(SLOW, EQUAL, seconds=60).speeds == EQUAL
    assert Watch().hear(SLOW, EQUAL, SLOW, seconds=60).speeds == SLOW
    assert Watch().hear(SLOW, [1.0, 1.0, 0.0], seconds=60).speeds == SLOW


def test_while_nobody_has_work_nothing_changes():
    watch = Watch().hear(SLOW, seconds=30).hear([0.0, 0.0, 0.0], seconds=1000)
    assert watch.speeds == SLOW
    assert watch.changes == 1


def test_a_slow_device_that_gets_nothing_is_tried_again_in_the_end():
    watch = Watch().hear(SLOW, seconds=30).hear([1.0, 1.0, 0.0], seconds=80)
    assert watch.speeds == SLOW
    assert watch.hear([1.0, 1.0, 0.0], seconds=40).speeds == EQUAL


def test_a_device_that_is_slow_whenever_it_is_used_is_tried_less_and_less_often():
    watch, slow_s = Watch(), []
    for _ in range(4):
        watch.hear(SLOW, seconds=22)
        began_s = watch.now_s
        while watch.speeds == SLOW:
            watch.hear([1.0, 1.0, 0.0], seconds=1)
        slow_s.append(watch.now_s - began_s)
    assert all(later > 1.8 * earlier for earlier, later in pairwise(slow_s))


def test_who_comes_in_a_slow_devices_place_has_not_been_seen_yet():
    watch = Watch().hear(SLOW, seconds=30)
    assert watch.heeded.forget(2)
    assert not watch.heeded.forget(2)
    assert watch.speeds == EQUAL


def test_a_long_pause_between_two_looks_is_not_seen_to_last():
    heeded = HeededSpeeds(3)
    for now_s in (0.0, 1000.0, 2000.0, 3000.0):
        assert not heeded.hear(np.array([SLOW]), now_s=now_s)


@pytest.mark.parametrize("nonsense", [np.nan, -1.0, np.inf])
def test_nonsense_of_an_engine_is_nothing_known(nonsense):
    watch = Watch().hear([1.0, 1.0, nonsense], SLOW, seconds=40)
    assert watch.speeds[2] in (0.25, 1.0)
    assert np.isfinite(watch.heeded.speed_D).all()


@drawn(15)
@given(seed=st.integers(0, 2**16), engines=st.integers(1, 3))
def test_noise_of_30_percent_around_equal_devices_never_changes_anything(seed, engines):
    chance, watch = np.random.default_rng(seed), Watch(4)
    for _ in range(600):
        watch.hear(*np.minimum(1.0, chance.uniform(0.7, 1.3, (engines, 4))), seconds=LOOK_S)
    assert watch.changes == 0


@drawn(15)
@given(seed=st.integers(0, 2**16), speed=st.floats(0.05, 0.6))
def test_noise_of_30_percent_around_a_slow_device_does_not_move_what_is_in_force(seed, speed):
    chance, watch = np.random.default_rng(seed), Watch(2)
    noisy = lambda: [1.0, min(1.0, speed * chance.uniform(0.7, 1.3))]  # noqa: E731 - one line
    for _ in range(1600):  # what is hardly slow is believed late
        watch.hear(noisy(), seconds=LOOK_S)
    settled = watch.changes
    assert settled <= 3
    for _ in range(1200):
        watch.hear(noisy(), seconds=LOOK_S)
    assert watch.changes - settled <= 1


@drawn(20)
@given(seed=st.integers(0, 2**16))
def test_a_recovery_is_noticed_through_noise(seed):
    chance, watch = np.random.default_rng(seed), Watch(2)
    watch.hear([1.0, 0.25], seconds=30)
    for _ in range(400):
        watch.hear([1.0, min(1.0, chance.uniform(0.7, 1.3))], seconds=LOOK_S)
    assert watch.speeds == [1.0, 1.0]


def serve(split, watch, slowness_D, *, layers, seed):
    """Layers of 5 ms whose devices' times have noise of 30%; one look in 250 ms."""
    cost = LayerCost(base_s=5e-5, touch_s=2e-5, token_s=1e-6)
    chance = np.random.default_rng(seed)
    for layer in range(layers):
        tokens_ED = split.split(chance.integers(0, 40, 8), np.ones((8, 3), dtype=bool))
        busy_s_D = cost.device_s(tokens_ED) * slowness_D * chance.uniform(0.7, 1.3, 3)
        split.note_work(tokens_ED, (busy_s_D * 1e9).astype(np.int64))
        if layer % 50 == 0:
            watch.hear(split.measured_D(), seconds=LOOK_S)


def test_from_measured_times_to_what_plans_heed_and_back():
    cost = LayerCost(base_s=5e-5, touch_s=2e-5, token_s=1e-6)
    split, watch = LiveSpeedSplitter(MinTimeSplitter, cost, note_every=1), Watch()
    split.split(np.ones(8, dtype=np.int64), np.ones((8, 3), dtype=bool))
    split.note_work(np.ones((8, 3), dtype=np.int64), np.ones(3, dtype=np.int64))
    serve(split, watch, np.ones(3), layers=3_000, seed=1)
    assert watch.changes == 0
    serve(split, watch, np.array([1.0, 1.0, 4.0]), layers=5_000, seed=2)
    assert watch.speeds == [1.0, 1.0, 0.25]
    serve(split, watch, np.ones(3), layers=8_000, seed=3)
    assert watch.speeds == EQUAL
    assert watch.changes <= 3
