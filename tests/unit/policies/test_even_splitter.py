import numpy as np
import pytest

from moeless.errors import PlanError
from moeless.policies.splitters.even import EvenSplitter


def split(count, replicas):
    return EvenSplitter().split(
        np.asarray(count, dtype=np.int64), np.asarray(replicas, dtype=bool)
    )


def test_a_single_replica_takes_all_tokens_of_its_expert():
    assert split([3, 5], [[0, 1], [1, 0]]).tolist() == [[0, 3], [5, 0]]


def test_replicas_share_evenly():
    assert split([6, 4], [[1, 1], [1, 1]]).tolist() == [[3, 3], [2, 2]]


def test_left_over_tokens_do_not_pile_up_on_the_first_device():
    # Four experts with one token each: two on either device.
    assert split([1, 1, 1, 1], np.ones((4, 2))).sum(axis=0).tolist() == [2, 2]


def test_a_left_over_token_goes_to_the_device_with_the_fewest_tokens():
    # Expert 1 keeps device 0 busy, so the odd token of expert 0 goes to device 1.
    assert split([3, 10], [[1, 1], [1, 0]]).tolist() == [[1, 2], [10, 0]]


def test_an_expert_without_tokens_needs_no_replica():
    assert split([0, 2], [[0, 0], [0, 1]]).tolist() == [[0, 0], [0, 2]]


def test_an_unused_expert_beside_shared_ones_needs_no_replica():
    assert split([0, 3], [[0, 0], [1, 1]]).tolist() == [[0, 0], [2, 1]]


@pytest.mark.parametrize("others", [[[1, 1]], [[1, 0]]])
def test_tokens_without_a_usable_replica_name_the_expert(others):
    with pytest.raises(PlanError, match="expert 1: 2 tokens but no usable replica"):
        split([5, 2], [*others, [0, 0]])


def test_a_negative_count_names_the_expert():
    with pytest.raises(PlanError, match="expert 1: -4 tokens"):
        split([5, -4], [[1, 0], [0, 1]])


def test_replicas_given_as_bytes_are_read_as_flags():
    result = EvenSplitter().split(
        np.array([4, 4], dtype=np.int32), np.array([[2, 1], [1, 0]], dtype=np.uint8)
    )
    assert result.tolist() == [[2, 2], [4, 0]]
    assert result.dtype == np.int64
