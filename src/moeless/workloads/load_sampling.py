"""Integer expert loads that tokens with K different experts each can really produce.

Loads of T tokens are possible exactly when they sum to T x K and no expert has more than T.
"""

import numpy as np
from numpy.typing import NDArray


def sample_loads(
    popularity_LE: NDArray[np.float64], tokens: int, top_k: int, rng: np.random.Generator
) -> NDArray[np.uint32]:
    """Draw the loads of one step.

    T x K assignments are drawn by popularity; what an expert gets beyond T is drawn again among
    those that have room, as a token cannot choose an expert twice.

    Args:
        popularity_LE: Probability of each expert; rows sum to 1 [L, E].
        tokens: T.
        top_k: K, at most E.
        rng: Source of chance.

    Returns:
        Tokens of each expert, uint32 [L, E].
    """
    loads_LE = rng.multinomial(tokens * top_k, popularity_LE)
    excess_L = _cut(loads_LE, tokens)
    while excess_L.any():  # each round fills another expert, or ends
        rows = np.flatnonzero(excess_L)
        loads = loads_LE[rows]
        share_RE = np.where(loads < tokens, popularity_LE[rows], 0.0)
        # Where only experts of no popularity have room, they share evenly.
        barren_R = share_RE.sum(axis=1) <= 0
        share_RE[barren_R] = (loads < tokens)[barren_R]
        share_RE /= share_RE.sum(axis=1, keepdims=True)
        loads_LE[rows] += rng.multinomial(excess_L[rows], share_RE)
        excess_L = _cut(loads_LE, tokens)
    return loads_LE.astype(np.uint32)


def apportion_around_hot(
    hot_NL: NDArray[np.int64], tokens: int, top_k: int, num_experts: int
) -> NDArray[np.uint32]:
    """Send every token to one hot expert per layer, and spread its other choices evenly.

    Args:
        hot_NL: The hot expert of each step and layer [N, L].
        tokens: T.
        top_k: K.
        num_experts: E.

    Returns:
        Tokens of each expert, uint32 [N, L, E].
    """
    others = num_experts - 1
    even, left = divmod(tokens * (top_k - 1), others) if others else (0, 0)
    # The experts after the hot one, in a circle, take what does not divide.
    rank_NLE = (np.arange(num_experts) - hot_NL[:, :, None]) % num_experts
    loads_NLE = even + (rank_NLE <= left)
    return np.where(rank_NLE == 0, tokens, loads_NLE).astype(np.uint32)


def _cut(loads_LE: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Take away in place what experts have beyond T; return how much, per layer [L]."""
    excess_L: NDArray[np.int64] = np.maximum(loads_LE - tokens, 0).sum(axis=1)
    np.minimum(loads_LE, tokens, out=loads_LE)
    return excess_L
