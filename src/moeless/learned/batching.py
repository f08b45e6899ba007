"""Which tokens of a recording would have been computed together."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeless.errors import ConfigError

Batching = Literal["recorded", "mixed", "decode"]

UNUSED = -1
"""Batch number of tokens that are in no batch."""


def batch_tokens(
    conversation_T: ArrayLike,
    position_T: ArrayLike,
    decode_T: ArrayLike,
    *,
    size: int,
    batching: Batching = "recorded",
    seed: int = 0,
) -> NDArray[np.int64]:
    """Number of the batch that each token is in.

    ``recorded``: ``size`` consecutive tokens, as a long prompt is computed; few conversations
    to a batch, so that its load is the least even and the hardest to predict.
    ``mixed``: tokens drawn from all conversations; what many users together come to.
    ``decode``: ``size`` conversations side by side, one decoded token of each to a batch, until
    fewer than half of them go on; the batch before is the step before.

    Args:
        conversation_T: Conversation of each token [T].
        position_T: Position in its conversation [T].
        decode_T: 1 where the token was decoded [T].
        size: Tokens of a batch.
        batching: Which of these.
        seed: Of ``mixed``.

    Returns:
        int64 [T], ``UNUSED`` for tokens that no whole batch could be made of. Batches are
        numbered in the order in which they would run.

    Raises:
        ConfigError: No such batching, or a size below 1.
    """
    if size < 1:
        raise ConfigError(f"batches of {size} tokens; use at least 1")
    conversation = np.asarray(conversation_T, dtype=np.int64)
    count = len(conversation)
    if batching == "recorded":
        return _cut(np.arange(count), size)
    if batching == "mixed":
        return _cut(np.random.default_rng(seed).permutation(count), size)
    if batching == "decode":
        return _side_by_side(conversation, np.asarray(position_T), np.asarray(decode_T), size)
    raise ConfigError(f"batching {batching!r} is unknown; use {', '.join(get_args(Batching))}")


def _cut(order: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    batch_T = np.full(len(order), UNUSED, dtype=np.int64)
    whole = len(order) // size * size
    batch_T[order[:whole]] = np.arange(whole) // size
    return batch_T


def _side_by_side(
    conversation: NDArray[np.int64],
    position: NDArray[np.int64],
    decode: NDArray[np.uint8],
    size: int,
) -> NDArray[np.int64]:
    batch_T = np.full(len(conversation), UNUSED, dtype=np.int64)
    rows = np.flatnonzero(decode)
    if not rows.size:
        return batch_T
    known, member = np.unique(conversation[rows], return_inverse=True)
    first = np.full(len(known), np.iinfo(np.int64).max)
    np.minimum.at(first, member, position[rows])
    step, group = position[rows] - first[member], member // size
    key = group * (int(step.max()) + 1) + step
    batches, batch, tokens = np.unique(key, return_inverse=True, return_counts=True)
    kept = tokens * 2 >= size
    number = np.where(kept, np.cumsum(kept) - 1, UNUSED)
    batch_T[rows] = number[batch]
    del batches
    return batch_T
