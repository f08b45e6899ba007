"""Loads of the busiest expert-parallel rank, as public kernel benchmarks draw them.

aiconfigurator's collector times a rank's kernel under power-law loads without recording the
draws; drawing from the same distribution again gives the expected tokens and experts touched.
The rules are the collector's (NVIDIA, Apache-2.0), the code is ours: weights from a truncated
power law are scaled to all assignments and rounded, no expert gets more tokens than the batch
has, what is over goes to the ranks in turn and there to the least loaded experts, and the rank
with the most tokens is timed.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import ConfigError


def draw_busiest_rank(
    rng: np.random.Generator,
    *,
    tokens: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    exponent: float,
) -> CountArray:
    """Draw the tokens of each expert on the busiest rank.

    Args:
        rng: Source of chance.
        tokens: T, rows of the batch over all ranks.
        num_experts: E.
        top_k: K.
        num_ranks: Ranks; they divide E.
        exponent: Of the power law, positive.

    Returns:
        Tokens int64 [E / ranks].

    Raises:
        ConfigError: Counts that are not positive, K above E, or ranks that do not divide E.
    """
    if min(tokens, num_experts, top_k, num_ranks) < 1 or top_k > num_experts or exponent <= 0:
        raise ConfigError("power-law draw: counts and the exponent must be positive, and K <= E")
    if num_experts % num_ranks:
        raise ConfigError(f"power-law draw: {num_ranks} ranks do not divide {num_experts} experts")
    total = tokens * top_k
    low, high = (1.0, 0.8 * tokens) if total > num_experts else (0.01, 2.0)
    weight_E = _truncated_power_law(rng.random(num_experts), low, high, exponent)
    count_E = np.rint(weight_E / weight_E.sum() * total).astype(np.int64)
    count_RE = np.minimum(count_E, tokens).reshape(num_ranks, -1)
    missing = total - int(count_RE.sum())
    count_RE = _deal(count_RE, missing, cap=tokens) if missing > 0 else _take(count_RE, -missing)
    busiest: CountArray = count_RE[np.argmax(count_RE.sum(axis=1))]
    return busiest


def _truncated_power_law(
    uniform_E: NDArray[np.float64], low: float, high: float, exponent: float
) -> NDArray[np.float64]:
    """Inverse of the cumulative distribution whose density falls as x^-exponent in [low, high]."""
    if exponent == 1.0:
        weight_E: NDArray[np.float64] = low * (high / low) ** uniform_E
        return weight_E
    power = 1.0 - exponent
    weight_E = (low**power + uniform_E * (high**power - low**power)) ** (1.0 / power)
    return weight_E


def _deal(count_RE: CountArray, units: int, *, cap: int) -> CountArray:
    """Deal tokens to the ranks in turn; in a rank, always to its least loaded expert."""
    room_R = cap * count_RE.shape[1] - count_RE.sum(axis=1)
    given_R = _raise_lowest(np.zeros_like(room_R), units, cap=room_R)
    caps = np.full(count_RE.shape[1], cap)
    rows = [
        _raise_lowest(count_E, int(given), cap=caps)
        for count_E, given in zip(count_RE, given_R, strict=True)
    ]
    return np.stack(rows)


def _raise_lowest(count_N: CountArray, units: int, *, cap: CountArray) -> CountArray:
    """Give units one by one to the lowest entry that is below its cap."""
    low, high = int(count_N.min()), int(cap.max())
    while low < high:  # the highest level up to which everybody can be lifted
        level = (low + high + 1) // 2
        used = int((_lifted(count_N, level, cap) - count_N).sum())
        low, high = (level, high) if used <= units else (low, level - 1)
    lifted = _lifted(count_N, low, cap)
    rest = units - int((lifted - count_N).sum())
    lifted[np.flatnonzero((lifted == low) & (lifted < cap))[:rest]] += 1
    return lifted


def _lifted(count_N: CountArray, level: int, cap: CountArray) -> CountArray:
    return np.minimum(np.maximum(count_N, level), cap)


def _take(count_RE: CountArray, units: int) -> CountArray:
    """Take tokens from the ranks in turn; in a rank, always from its most loaded expert.

    Rounding adds at most one token per two experts, so there are few to take.
    """
    while units > 0:
        for count_E in count_RE:
            most = int(np.argmax(count_E))
            taken = min(int(count_E[most]), units, 1)
            count_E[most] -= taken
            units -= taken
    return count_RE
