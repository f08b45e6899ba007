"""What a worker's pulse says about it."""

import os
import time

import pytest

from effort import PATIENCE_S
from moeless.functions.links.pulse import Pulse, create_region, start_beating


@pytest.fixture
def region():
    fd = create_region()
    yield fd
    os.close(fd)


def test_nothing_has_been_heard_of_a_worker_that_never_started(region):
    assert Pulse(region).last_s() == 0


def test_a_beat_is_seen_through_another_view_at_the_time_when_it_was_made(region):
    ours, theirs = Pulse(region), Pulse(region)
    before_s = time.monotonic()
    theirs.beat()
    assert before_s <= ours.last_s() <= time.monotonic()


def test_a_pulse_goes_on_beating_by_itself(region):
    watched = Pulse(region)
    start_beating(region)
    first_s = watched.last_s()
    deadline_s = time.monotonic() + PATIENCE_S
    while watched.last_s() == first_s:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_pulse_says_whom_the_worker_serves_and_since_when(region):
    ours, theirs = Pulse(region), Pulse(region)
    assert ours.serves(3)  # nobody as yet: it could
    for engine in (3, 4, (1 << 16) + 2):
        before_s = time.monotonic()
        theirs.serve(engine)
        assert before_s - 0.001 <= ours.serving_since_s() <= time.monotonic()
        assert [ours.serves(other) for other in (engine - 1, engine, engine + 1)] == [
            False,
            True,
            False,
        ]
        theirs.serve(None)
        assert all(ours.serves(other) for other in (engine, 99))


def test_a_pulse_can_be_given_back(region):
    pulse = Pulse(region)
    pulse.beat()
    pulse.close()
