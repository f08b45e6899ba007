"""What a process holds until it ends is left out of collections."""

import gc
import weakref

import pytest

from moeless.core.garbage import exempt_what_stays


class Node:
    """Can be part of a ring, and seen from outside."""


def make_ring():
    one, other = Node(), Node()
    one.other, other.other = other, one
    return weakref.ref(one)


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_garbage_goes_first_and_what_is_left_is_exempt():
    ring, kept = make_ring(), Node()
    exempt_what_stays()
    assert ring() is None
    assert gc.get_freeze_count() > 1000
    assert all(each is not kept for each in gc.get_objects())


def test_later_garbage_is_still_collected():
    exempt_what_stays()
    ring = make_ring()
    gc.collect()
    assert ring() is None
