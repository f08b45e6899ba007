"""What is to be loaded next is fetched once, by the fetcher or by whoever needs it first."""

import threading

import pytest

from effort import PATIENCE_S
from moeless.core.model import FunctionId
from moeless.errors import CheckpointError
from moeless.functions.worker.fetcher import Fetcher

A, B = FunctionId("m", 0, 0), FunctionId("m", 0, 1)


def test_a_load_waits_for_the_fetch_that_is_under_way():
    begun, allowed, done = threading.Event(), threading.Event(), []

    def fetch(function):
        begun.set()
        assert allowed.wait(PATIENCE_S)
        done.append(function)

    fetcher = Fetcher(fetch)
    fetcher.start()
    fetcher.expect(A)
    assert begun.wait(PATIENCE_S)
    waiting = threading.Thread(target=fetcher.settle, args=(A,))
    waiting.start()
    assert not done
    allowed.set()
    waiting.join(PATIENCE_S)
    assert done == [A]


def test_what_has_not_begun_is_fetched_by_whoever_needs_it():
    done = []
    fetcher = Fetcher(done.append)  # its thread has not started
    fetcher.expect(A)
    fetcher.expect(B)
    fetcher.settle(B)
    assert done == [B]
    fetcher.settle(B)
    fetcher.settle(FunctionId("m", 1, 0))
    assert done == [B]


@pytest.mark.parametrize("error", [CheckpointError("damaged"), MemoryError()])
def test_a_fetch_that_fails_is_nobodys_concern(error):
    tried = []

    def fetch(function):
        tried.append(function)
        raise error

    fetcher = Fetcher(fetch)
    fetcher.expect(A)
    fetcher.settle(A)
    fetcher.start()
    fetcher.expect(B)
    fetcher.settle(B)
    assert tried == [A, B]
