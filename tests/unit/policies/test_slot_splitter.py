import numpy as np
import pytest

from moeless.core.copies import divides_by_copies
from moeless.errors import PlanError
from moeless.policies.splitters import SPLITTERS
from moeless.policies.splitters.even import EvenSplitter
from moeless.policies.splitters.slots import SlotSplitter


def test_it_is_the_splitter_slots_and_alone_asks_for_copies():
    assert isinstance(SPLITTERS.create("slots"), SlotSplitter)
    assert divides_by_copies(SlotSplitter())
    assert not divides_by_copies(EvenSplitter())


def test_two_slots_get_two_shares():
    copies = np.array([[2, 1], [0, 1]], dtype=np.uint8)
    assert SlotSplitter().split(np.array([9, 4]), copies).tolist() == [[6, 3], [0, 4]]


def test_left_over_tokens_go_to_the_least_loaded_device():
    copies = np.array([[1, 1], [2, 1]])
    assert SlotSplitter().split(np.array([1, 4]), copies).tolist() == [[0, 1], [3, 1]]


@pytest.mark.parametrize("count", [[-1, 0], [0, 1]])
def test_it_refuses_what_it_cannot_divide(count):
    with pytest.raises(PlanError, match=r"expert [01]: -?1 tokens for"):
        SlotSplitter().split(np.array(count), np.array([[1], [0]]))


def test_many_copies_are_not_counted_in_bytes():
    copies = np.array([[255, 254]], dtype=np.uint8)
    assert SlotSplitter().split(np.array([509_000]), copies).tolist() == [[255_000, 254_000]]
