"""What models do to each row by itself: norms, and attention of one new token per sequence.

As with products (``panels``) a row's result is the same whichever rows are computed beside it.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from moeless.functions.compute.team import run_together, team_size
from moeless.functions.compute.tiles import (
    HALF,
    doubles_at,
    exp_of_16,
    fetch_add,
    floats_at,
    halves_at,
    integers_at,
    source_stamp,
    words_at,
)
from moeless.policies.kernels.compiled import compiled, compiled_callback

_numba: Any = numba  # has few types
carray = _numba.carray
_inlined = _numba.njit(nogil=True)
_reordered = _numba.njit(nogil=True, fastmath={"reassoc", "contract"})
_ALONE: Final = 2e5
"""Multiplications of an attention up to which a second thread costs more than it brings."""


@compiled("void(float32[:,::1], float32[::1], float64, float32[:,::1])", reorders_sums=True)
def _norm_floats(x_TH, weight_H, epsilon, out_TH):
    rows, width = x_TH.shape
    for row in range(rows):
        total = np.float32(0.0)
        for i in range(width):
            total += x_TH[row, i] * x_TH[row, i]
        scale = np.float32(1.0 / np.sqrt(np.float64(total) / width + epsilon))
        for i in range(width):
            out_TH[row, i] = weight_H[i] * (x_TH[row, i] * scale)


@compiled("void(uint16[:,::1], float32[::1], float64, uint16[:,::1])", reorders_sums=True)
def _norm_halves(x_TH, weight_H, epsilon, out_TH):
    rows, width = x_TH.shape
    words = np.empty(width, np.uint32)
    floats = words.view(np.float32)
    half, one, sixteen = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    for row in range(rows):
        for i in range(width):
            words[i] = np.uint32(x_TH[row, i]) << sixteen
        total = np.float32(0.0)
        for i in range(width):
            total += floats[i] * floats[i]
        scale = np.float32(1.0 / np.sqrt(np.float64(total) / width + epsilon))
        if not np.isfinite(scale * total):
            for i in range(width):
                out_TH[row, i] = np.uint16(0x7FC0)
            continue
        for i in range(width):
            floats[i] = weight_H[i] * (floats[i] * scale)
        for i in range(width):
            out_TH[row, i] = np.uint16(
                (words[i] + half + ((words[i] >> sixteen) & one)) >> sixteen
            )


def rms_norm(x: torch.Tensor, weight: NDArray[np.float32], epsilon: float) -> torch.Tensor:
    """Each row divided by the root of its mean square, times a weight.

    Args:
        x: [..., H], float32 or bfloat16 on the CPU.
        weight: [H].
        epsilon: Added to the mean square.

    Returns:
        The same shape and dtype, in new memory; rounded once.
    """
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.dtype == torch.float32:
        _norm_floats(x.view(-1, width).numpy(), weight, epsilon, out.view(-1, width).numpy())
    else:
        rows, kept = (each.view(-1, width).view(torch.uint16).numpy() for each in (x, out))
        _norm_halves(rows, weight, epsilon, kept)
    return out


# What an attention is told, int64 each.
_NEXT, _TASKS, _THREAD, _HERE, _SCRATCH, _SCRATCH_BYTES = 0, 1, 2, 3, 4, 5
_Q, _Q_ROW, _Q_HEAD, _K, _K_ROW, _K_HEAD, _K_COLUMN = 6, 7, 8, 9, 10, 11, 12
_V, _V_ROW, _V_HEAD, _V_COLUMN, _OUT, _OUT_ROW, _OUT_HEAD = 13, 14, 15, 16, 17, 18, 19
_HALVES, _HEADS, _GROUP, _DEPTH, _WIDTH, _BEGINS, _ENDS, _SINKS, _SCALE = (
    20, 21, 22, 23, 24, 25, 26, 27, 28,
)  # fmt: skip
_FIELDS: Final = 29


@_inlined
def _widen(address, halves, count, place):
    """So many floats from an address, copied and widened to a place; they may be there already."""
    words = carray(words_at(place), (count,))
    if halves:
        short = carray(halves_at(address), (count,))
        for i in range(count):
            words[i] = np.uint32(short[i]) << np.uint32(16)
    else:
        given = carray(words_at(address), (count,))
        for i in range(count):
            words[i] = given[i]


@_reordered
def _dot(a, b, count):
    total = np.float32(0.0)
    for i in range(count):
        total += a[i] * b[i]
    return total


@_reordered
def _sum(values, count):
    total = np.float32(0.0)
    for i in range(count):
        total += values[i]
    return total


@_inlined
def _attend_one(d, row, head, base):
    """All queries of one sequence that share a head of keys."""
    group, depth, width, halves = d[_GROUP], d[_DEPTH], d[_WIDTH], d[_HALVES]
    size = 2 if halves else 4
    begin = carray(integers_at(d[_BEGINS]), (row + 1,))[row]
    end = carray(integers_at(d[_ENDS]), (row + 1,))[row]
    count = end - begin
    padded = (count + HALF - 1) // HALF * HALF
    scale = np.float32(carray(doubles_at(d[_SCALE]), (1,))[0])
    line_at = base + group * depth * 4
    sums_at = line_at + max(depth, width) * 4
    scores_at = sums_at + group * width * 4
    line = carray(floats_at(line_at), (max(depth, width),))
    for g in range(group):
        at = d[_Q] + (row * d[_Q_ROW] + (head * group + g) * d[_Q_HEAD]) * size
        _widen(at, halves, depth, base + g * depth * 4)
        query = carray(floats_at(base + g * depth * 4), (depth,))
        for i in range(depth):
            query[i] *= scale
    for column in range(count):
        at = d[_K] + (row * d[_K_ROW] + head * d[_K_HEAD] + (begin + column) * d[_K_COLUMN]) * size
        _widen(at, halves, depth, line_at)
        for g in range(group):
            query = carray(floats_at(base + g * depth * 4), (depth,))
            carray(floats_at(scores_at + g * padded * 4), (padded,))[column] = _dot(
                query, line, depth
            )
    for g in range(group):
        scores = carray(floats_at(scores_at + g * padded * 4), (padded,))
        highest = scores[0]
        for column in range(1, count):
            highest = max(highest, scores[column])
        total = np.float32(0.0)
        sink = np.float32(0.0)
        if d[_SINKS]:
            sink = carray(floats_at(d[_SINKS]), (head * group + g + 1,))[head * group + g]
            highest = max(highest, sink)
        for column in range(count, padded):
            scores[column] = highest
        for column in range(0, padded, HALF):
            exp_of_16(scores_at + (g * padded + column) * 4, highest)
        total = _sum(scores, count)
        if d[_SINKS]:
            for i in range(HALF):
                line[i] = sink
            exp_of_16(line_at, highest)
            total += line[0]
        share = np.float32(1.0) / total
        sums = carray(floats_at(sums_at + g * width * 4), (width,))
        for column in range(count):
            scores[column] *= share
        for i in range(width):
            sums[i] = np.float32(0.0)
    for column in range(count):
        at = d[_V] + (row * d[_V_ROW] + head * d[_V_HEAD] + (begin + column) * d[_V_COLUMN]) * size
        _widen(at, halves, width, line_at)
        for g in range(group):
            weight = carray(floats_at(scores_at + g * padded * 4), (padded,))[column]
            sums = carray(floats_at(sums_at + g * width * 4), (width,))
            for i in range(width):
                sums[i] += weight * line[i]
    for g in range(group):
        at = d[_OUT] + (row * d[_OUT_ROW] + (head * group + g) * d[_OUT_HEAD]) * size
        words = carray(words_at(sums_at + g * width * 4), (width,))
        if halves:
            short = carray(halves_at(at), (width,))
            for i in range(width):
                bits = words[i]
                odd = (bits >> np.uint32(16)) & np.uint32(1)
                short[i] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        else:
            kept = carray(words_at(at), (width,))
            for i in range(width):
                kept[i] = words[i]


@cache
def _attend() -> Any:
    """The compiled attention; threads take a sequence's head at a time."""
    stamp = source_stamp(Path(__file__))

    def attend(pointer):
        if not stamp:
            return
        d = carray(pointer, (_FIELDS,))
        base = d[_SCRATCH] + fetch_add(d[_HERE] + 8 * _THREAD, 1) * d[_SCRATCH_BYTES]
        while True:
            task = fetch_add(d[_HERE] + 8 * _NEXT, 1)
            if task >= d[_TASKS]:
                break
            _attend_one(d, task // d[_HEADS], task % d[_HEADS], base)

    return compiled_callback(types.void(types.CPointer(types.int64)), attend)


class DecodeAttention:
    """Attention of one new token per sequence over keys and values that lie in a batch's buffers.

    For one thread at a time. Compiles its loops when it is made.
    """

    def __init__(self) -> None:
        self._run: int = _attend().address
        self._fields = np.zeros(_FIELDS, dtype=np.int64)
        self._scale = np.zeros(1)
        self._scratch = np.zeros(0, dtype=np.uint8)
        self._fields[_HERE] = self._fields.ctypes.data
        self._fields[_SCALE] = self._scale.ctypes.data

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        begin_B: NDArray[np.int64],
        end_B: NDArray[np.int64],
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [B, heads, 1, D], float32 or bfloat16 on the CPU.
            keys: [B, key heads, columns, D]; heads are a multiple of theirs.
            values: [B, key heads, columns, V].
            begin_B: The first column that each sequence sees.
            end_B: The column after the last; at least one more than the first.
            scale: Of the products.
            sinks: A further score of each head that takes its share of attention, float32 [heads].

        Returns:
            [B, 1, heads, V].
        """
        batch, heads, _, depth = query.shape
        key_heads, width = keys.shape[1], values.shape[3]
        query, keys, values = (
            each if each.stride(3) == 1 else each.contiguous() for each in (query, keys, values)
        )
        out = torch.empty(batch, 1, heads, width, dtype=query.dtype)
        group, longest = heads // key_heads, int((end_B - begin_B).max()) + HALF
        threads = team_size()
        if batch * heads * longest * (depth + width) <= _ALONE:
            threads = 1
        each = 4 * (group * (depth + width + longest) + max(depth, width, HALF)) + 64
        if threads * each > len(self._scratch):
            self._scratch = np.zeros(2 * threads * each, dtype=np.uint8)
        self._scale[0] = scale
        self._fields[:] = (
            *(0, batch * key_heads, 0, self._fields[_HERE], self._scratch.ctypes.data, each),
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1), keys.stride(2)),
            *(values.data_ptr(), values.stride(0), values.stride(1), values.stride(2)),
            *(
                out.data_ptr(),
                heads * width,
                width,
                query.dtype == torch.bfloat16,
                key_heads,
                group,
            ),
            *(depth, width, begin_B.ctypes.data, end_B.ctypes.data),
            *(0 if sinks is None else sinks.data_ptr(), self._fields[_SCALE]),
        )
        run_together(self._run, int(self._fields[_HERE]), threads)
        return out
