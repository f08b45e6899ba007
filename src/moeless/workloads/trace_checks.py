"""What must hold between the arrays of a routing trace; each check names the first offender.

Knows arrays only, neither files nor the trace class.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError

_BLOCK_BYTES: Final = 64 * 2**20
"""Scratch memory of one block of entries."""


def check_array(
    array: object, name: str, *, dtype: np.dtype[Any] | str, shape: tuple[int | None, ...]
) -> None:
    """Check type, dtype and shape.

    Args:
        array: The array.
        name: Its name in the file.
        dtype: A dtype, or a kind: ``u`` for unsigned integers, ``U`` for text.
        shape: Expected extents; None where any will do.

    Raises:
        TraceError: Something differs.
    """
    if not isinstance(array, np.ndarray):
        raise TraceError(f"{name} is a {type(array).__name__}; it must be a numpy array")
    if isinstance(dtype, str):
        good, wanted = array.dtype.kind == dtype, {"u": "uint32", "U": "unicode text"}[dtype]
    else:
        good, wanted = array.dtype == dtype, str(dtype)
    if not good:
        raise TraceError(f"{name} has dtype {array.dtype}; store it as {wanted}")
    fits = len(array.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits:
        text = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise TraceError(f"{name} has shape {list(array.shape)}; expected [{text}]")


def check_not_negative(values: NDArray[Any], name: str) -> None:
    """Refuse NaN, infinite and negative values; names the first one's index.

    Raises:
        TraceError: There is one.
    """
    good = values >= 0
    if values.dtype.kind == "f":
        good &= values < np.inf
    if not good.all():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmin(good)), values.shape))
        raise TraceError(
            f"{name}[{', '.join(map(str, index))}] is {values[index]}; it must be finite and >= 0"
        )


def check_times(time_s_N: NDArray[np.float64]) -> None:
    """Refuse times that are not finite, negative, or that go back.

    Raises:
        TraceError: There is one.
    """
    check_not_negative(time_s_N, "time_s")
    back = np.diff(time_s_N) < 0
    if back.any():
        n = int(np.argmax(back)) + 1
        raise TraceError(
            f"time_s[{n}] is {time_s_N[n]}, before time_s[{n - 1}] = {time_s_N[n - 1]}; sort the "
            f"steps by time"
        )


def check_loads(loads_NLE: NDArray[Any], tokens_N: NDArray[np.int32], top_k: int) -> None:
    """Every token of every entry is at ``top_k`` different experts of every layer.

    Args:
        loads_NLE: Tokens routed to each expert, unsigned [N, L, E].
        tokens_N: Tokens of each entry, int32 [N].
        top_k: K.

    Raises:
        TraceError: Some loads[n, l] does not add up to tokens[n] x K, or an expert has more
            tokens than there are.
    """
    for block in _blocks(len(tokens_N), loads_NLE[:1].size * 8):
        loads, tokens = loads_NLE[block], tokens_N[block].astype(np.int64)
        # A sum can only wrap where one load is out of range, and that is wrong in any case.
        sums_NL = loads.sum(axis=2, dtype=np.uint64)
        most_NL = loads.max(axis=2)
        want_N1 = (tokens * top_k).astype(np.uint64)[:, None]
        bad_NL = (sums_NL != want_N1) | (most_NL > tokens.astype(np.uint64)[:, None])
        if not bad_NL.any():
            continue
        i, layer = (int(x) for x in np.unravel_index(int(np.argmax(bad_NL)), bad_NL.shape))
        n, where = block.start + i, f"loads[n={block.start + i}, l={layer}]"
        if most_NL[i, layer] > tokens[i]:
            expert = int(np.argmax(loads[i, layer]))
            raise TraceError(
                f"{where}: expert {expert} has {loads[i, layer, expert]} tokens, but tokens[{n}] "
                f"is {tokens[i]}; a token counts once per expert it is sent to"
            )
        raise TraceError(
            f"{where} sums to {sums_NL[i, layer]}, but tokens[{n}] x top_k is {tokens[i]} x "
            f"{top_k} = {tokens[i] * top_k}; count every real token once per chosen expert, no "
            f"padding"
        )


def check_topk_ids(
    ids_TLK: NDArray[np.int16],
    offsets: NDArray[np.int64],
    loads_NLE: NDArray[Any],
    tokens_N: NDArray[np.int32],
) -> None:
    """The experts of every token are different ones, and add up to the loads.

    Args:
        ids_TLK: Chosen experts, int16 [T, L, K].
        offsets: The tokens of entry n are offsets[n]:offsets[n + 1], int64 [N + 1].
        loads_NLE: Tokens routed to each expert [N, L, E].
        tokens_N: Tokens of each entry, int32 [N].

    Raises:
        TraceError: The offsets do not fit the tokens, an id is out of range or repeated, or the
            counts differ.
    """
    _check_offsets(offsets, len(ids_TLK), tokens_N)
    num_experts = loads_NLE.shape[2]
    bytes_each = max(ids_TLK[:1].size * 40, 1)
    for start, stop in _entry_groups(offsets, _BLOCK_BYTES // bytes_each):
        first = int(offsets[start])
        ids = ids_TLK[first : int(offsets[stop])]
        _check_ids(ids, first, num_experts)
        counts = _count_ids(ids, tokens_N[start:stop], num_experts)
        differs_NL = (counts != loads_NLE[start:stop]).any(axis=2)
        if differs_NL.any():
            where = np.unravel_index(int(np.argmax(differs_NL)), differs_NL.shape)
            raise TraceError(
                f"topk_ids of entry n={start + int(where[0])}, l={int(where[1])} do not add up to "
                f"its loads; write both from the same routing"
            )


def _check_offsets(
    offsets: NDArray[np.int64], num_tokens: int, tokens_N: NDArray[np.int32]
) -> None:
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise TraceError(
            f"topk_offsets run from {offsets[0]} to {offsets[-1]}; topk_ids has {num_tokens} "
            f"tokens, so they must run from 0 to {num_tokens}"
        )
    wrong = np.diff(offsets) != tokens_N
    if wrong.any():
        n = int(np.argmax(wrong))
        step = offsets[n + 1] - offsets[n]
        reason = "they must ascend" if step < 0 else f"but tokens[{n}] is {tokens_N[n]}"
        raise TraceError(f"topk_offsets give entry n={n} {step} tokens; {reason}")


def _check_ids(ids_TLK: NDArray[np.int16], first: int, num_experts: int) -> None:
    bad = (ids_TLK < 0) | (ids_TLK >= num_experts)
    if bad.any():
        t, layer, k = (int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        raise TraceError(
            f"topk_ids[{first + t}, {layer}, {k}] is {ids_TLK[t, layer, k]}; logical experts are "
            f"0 to {num_experts - 1}"
        )
    ordered = np.sort(ids_TLK, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if twice.any():
        t, layer = (int(i) for i in np.unravel_index(int(np.argmax(twice)), twice.shape))
        raise TraceError(
            f"topk_ids[{first + t}, {layer}] = {ids_TLK[t, layer].tolist()} names an expert "
            f"twice; a token's experts are different ones"
        )


def _count_ids(
    ids_TLK: NDArray[np.int16], tokens_N: NDArray[np.int32], num_experts: int
) -> NDArray[np.int64]:
    num_layers, shape = ids_TLK.shape[1], (len(tokens_N), ids_TLK.shape[1], num_experts)
    entry_T = np.repeat(np.arange(len(tokens_N)), tokens_N)
    row_TL = entry_T[:, None] * num_layers + np.arange(num_layers)
    keys = row_TL[:, :, None] * num_experts + ids_TLK
    return np.bincount(keys.ravel(), minlength=int(np.prod(shape))).reshape(shape)


def _blocks(count: int, bytes_each: int) -> list[slice]:
    size = max(1, _BLOCK_BYTES // max(bytes_each, 1))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _entry_groups(offsets: NDArray[np.int64], max_tokens: int) -> list[tuple[int, int]]:
    """Ranges of whole entries with about ``max_tokens`` tokens; a larger entry stands alone."""
    groups, start, count = [], 0, len(offsets) - 1
    while start < count:
        fits = int(np.searchsorted(offsets, offsets[start] + max_tokens, side="right")) - 1
        stop = min(max(fits, start + 1), count)
        groups.append((start, stop))
        start = stop
    return groups
