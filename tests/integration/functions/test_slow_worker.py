"""A worker that is really throttled gets fewer tokens, and as many as before afterwards."""

import os
import signal
import threading

import numpy as np
import pytest

from moeless.config import PolicyConfig

pytestmark = pytest.mark.slow

REPLICATED = PolicyConfig(policy="paper", splitter="min_time", memory_factor=2.0, cv_threshold=0.0)
"""Most experts on both devices, so that the tokens can be divided."""


class Throttle:
    """Lets a process run for a fifth of the time while it is entered."""

    def __init__(self, pid):
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._over.wait(0.002):
            os.kill(self._pid, signal.SIGSTOP)
            self._over.wait(0.008)
            os.kill(self._pid, signal.SIGCONT)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def share_of(served, device, run):
    """The device's part of the tokens that were computed meanwhile."""
    before_D = served.runtime.snapshot().device_tokens_LD.sum(axis=0)
    run()
    tokens_D = served.runtime.snapshot().device_tokens_LD.sum(axis=0) - before_D
    return tokens_D[device] / tokens_D.sum()


def test_a_throttled_worker_gets_fewer_tokens_and_no_token_changes(
    reference, serve, tokens_of, wait_until
):
    directory, expected = reference
    served = serve(directory, policy=REPLICATED, slots=64)

    def run():
        for _ in range(5):
            assert tokens_of(served.model) == expected

    run()
    before = share_of(served, 1, run)
    assert before == pytest.approx(0.5, abs=0.15)
    with Throttle(served.worker_pids()[1]):
        wait_until(lambda: share_of(served, 1, run) < 0.6 * before)
        assert served.runtime.snapshot().device_speed_D[1] < 1
    assert share_of(served, 1, run) > 0  # so that its recovery is noticed
    assert served.client.report()["worker_restarts"] == [0, 0]
    served.close()


def test_experts_leave_a_worker_that_engines_find_slow(reference, serve, tokens_of, wait_until):
    directory, expected = reference
    # One replica of each expert; what is measured is what the test says.
    policy = PolicyConfig(memory_factor=1.0)
    served = serve(directory, policy=policy, slots=64, live_speeds=False)
    board = served.client.board

    def planned_after_requests(speeds):
        board.post_speeds(np.array(speeds))
        assert tokens_of(served.model) == expected
        return int(board.planned_LED[:, :, 1].sum())

    # Searches move experts meanwhile, so what counts is the step from equal speeds to the others.
    planned = [planned_after_requests([1.0, 1.0])]

    def has_fewer():
        now = planned_after_requests([1.0, 0.1])
        if served.runtime.snapshot().planned_speed_D == (1.0, 0.125):
            return now < planned[0]
        planned[0] = now
        return False

    wait_until(has_fewer)
    assert board.planned_LED.any(axis=2).all()
    assert tokens_of(served.model) == expected
    served.close()
