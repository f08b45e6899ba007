"""Which tokens are computed together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.errors import ConfigError
from moeless.learned.batching import UNUSED, batch_tokens

NOTHING = np.zeros(0, dtype=np.int64)


def batches(size, batching, conversation, position, decode):
    return batch_tokens(conversation, position, decode, size=size, batching=batching)


def test_recorded_batches_are_consecutive_tokens():
    tokens = np.arange(7)
    found = batches(3, "recorded", tokens * 0, tokens, tokens * 0)
    assert found.tolist() == [0, 0, 0, 1, 1, 1, UNUSED]


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(["recorded", "mixed"]))
def test_every_batch_is_full_and_as_many_as_possible(tokens, size, batching):
    zeros = np.zeros(tokens, dtype=np.int64)
    found = batches(size, batching, zeros, np.arange(tokens), zeros)
    used = found[found != UNUSED]
    assert len(used) == tokens // size * size
    assert (np.bincount(used, minlength=tokens // size) == size).all()


def test_mixed_batches_are_the_same_for_the_same_seed():
    zeros = np.zeros(50, dtype=np.int64)
    first, again = (batches(5, "mixed", zeros, np.arange(50), zeros) for _ in range(2))
    assert (first == again).all()
    assert (first != batches(5, "recorded", zeros, np.arange(50), zeros)).any()


def test_decode_batches_take_one_token_of_each_conversation():
    # Two conversations: 2 prompt tokens and 3 decoded, 1 prompt token and 2 decoded.
    conversation = np.array([4, 4, 4, 4, 4, 9, 9, 9])
    position = np.array([0, 1, 2, 3, 4, 0, 1, 2])
    decode = np.array([0, 0, 1, 1, 1, 0, 1, 1])
    found = batches(2, "decode", conversation, position, decode)
    assert found.tolist() == [UNUSED, UNUSED, 0, 1, 2, UNUSED, 0, 1]


def test_decode_batches_end_when_fewer_than_half_go_on():
    conversation = np.array([0, 0, 1, 2])
    position = np.array([1, 2, 1, 1])
    found = batches(3, "decode", conversation, position, np.ones(4))
    assert found.tolist() == [0, UNUSED, 0, 0]


@pytest.mark.parametrize("batching", ["recorded", "mixed", "decode"])
def test_no_tokens_make_no_batch(batching):
    assert batches(2, batching, NOTHING, NOTHING, NOTHING).size == 0


@pytest.mark.parametrize(("size", "batching"), [(0, "recorded"), (2, "sorted")])
def test_wrong_options_are_named(size, batching):
    with pytest.raises(ConfigError, match=f"{size} tokens|'sorted' is unknown"):
        batches(size, batching, NOTHING, NOTHING, NOTHING)
