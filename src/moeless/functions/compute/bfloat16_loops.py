"""Compiled products of bfloat16 rows and small experts, with the processor's own instruction.

Tiles of up to eight rows and 32 columns stay in registers while the weights of an expert pass by
once. So the time of an expert grows with its rows, whichever slots others are in, and no number of
rows needs code of its own. Each element is summed in one order, whatever the tile: a row's result
does not depend on the rows beside it.

Importing this compiles, and ends the process on a processor without ``avx512_bf16``: ask
``bfloat16_products.can_multiply`` first. Bits of bfloat16 are handled as uint16.
"""

from typing import Any, Final

import numba.core.cgutils
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from moeless.policies.kernels.compiled import compiled

COLUMNS: Final = 32
"""Columns of a tile; there are at least as many outputs."""
_LANES: Final = 16
_DOT: Final = "llvm.x86.avx512bf16.dpbf16ps.512"
"""Adds to each of 16 floats the sum of two products of bfloat16."""

cgutils: Any = numba.core.cgutils  # has no types

_Bits = NDArray[np.uint16]
_Ints = NDArray[np.int64]


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know. Where its base has gone, the import fails."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_INT64, _INT32 = ir.IntType(64), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_PAIRS = ir.VectorType(_INT32, _LANES)
_BITS = ir.VectorType(ir.IntType(16), 2 * _LANES)
_BFLOATS = ir.VectorType(_BFloat(), 2 * _LANES)


def _lanes(order: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_INT32, len(order)), order)


def _interleaving(first: int) -> ir.Constant:
    """Lanes that pair 16 elements of one vector of 32 with those below them in another."""
    return _lanes([first + lane + 32 * which for lane in range(_LANES) for which in (0, 1)])


def _make_tile(rows: int) -> Any:
    """A function that computes so many rows of 32 columns.

    It takes ``(source, row_N, first, weight, column, out, place)``: rows ``row_N[first:]`` of the
    source times the weight's columns from the given one on [K, N] go to the rows of ``out`` from
    ``place`` on.
    """

    @intrinsic
    def tile(
        _typing: Any,
        source: Any,
        row_N: Any,
        first: Any,
        weight: Any,
        column: Any,
        out: Any,
        place: Any,
    ) -> Any:
        signature = types.void(source, row_N, first, weight, column, out, place)
        return signature, lambda context, builder, sig, args: _emit(
            context, builder, sig, args, rows
        )

    return tile


def _emit(context: Any, builder: Any, signature: Any, args: Any, rows: int) -> Any:
    """The tile's code: one pass over pairs of the weight's rows."""
    arrays = [
        context.make_array(kind)(context, builder, value)
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, args, strict=True)
    ]
    source, row_N, first, weight, column, out, place = arrays
    depth, width = cgutils.unpack_tuple(builder, weight.shape, 2)
    source_width = cgutils.unpack_tuple(builder, source.shape, 2)[1]

    inputs = []
    for row in range(rows):
        index = builder.load(builder.gep(row_N.data, [builder.add(first, _INT64(row))]))
        inputs.append(builder.gep(source.data, [builder.mul(index, source_width)]))
    sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(2)] for _ in range(rows)]
    for one in sums:
        for half in one:
            builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), half)

    dot_type = ir.FunctionType(_FLOATS, [_FLOATS, _BFLOATS, _BFLOATS])
    dot = cgutils.get_or_insert_function(builder.module, dot_type, _DOT)
    undefined = ir.Constant(_PAIRS, ir.Undefined)
    columns = builder.gep(weight.data, [column])
    with cgutils.for_range(builder, builder.lshr(depth, _INT64(1))) as loop:
        upper = builder.shl(loop.index, _INT64(1))
        upper_bits = builder.gep(columns, [builder.mul(upper, width)])
        loaded = [
            builder.load(builder.bitcast(pointer, _BITS.as_pointer()), align=2)
            for pointer in (upper_bits, builder.gep(upper_bits, [width]))
        ]
        weights = [
            builder.bitcast(builder.shuffle_vector(*loaded, _interleaving(half)), _BFLOATS)
            for half in (0, _LANES)
        ]
        for row in range(rows):
            pair = builder.bitcast(builder.gep(inputs[row], [upper]), _INT32.as_pointer())
            lane = builder.insert_element(undefined, builder.load(pair, align=2), _INT32(0))
            spread = builder.shuffle_vector(lane, undefined, _lanes([0] * _LANES))
            pairs = builder.bitcast(spread, _BFLOATS)
            for half, part in zip(sums[row], weights, strict=True):
                builder.store(builder.call(dot, [builder.load(half), pairs, part]), half)

    out_width = cgutils.unpack_tuple(builder, out.shape, 2)[1]
    for row in range(rows):
        both = builder.shuffle_vector(
            *(builder.load(half) for half in sums[row]), _lanes(list(range(COLUMNS)))
        )
        bits = builder.bitcast(builder.fptrunc(both, _BFLOATS), _BITS)
        start = builder.mul(builder.add(place, _INT64(row)), out_width)
        pointer = builder.gep(out.data, [builder.add(start, column)])
        builder.store(bits, builder.bitcast(pointer, _BITS.as_pointer()), align=2)
    return context.get_dummy_value()


_tile_1, _tile_2, _tile_3, _tile_4 = (_make_tile(rows) for rows in range(1, 5))
_tile_5, _tile_6, _tile_7, _tile_8 = (_make_tile(rows) for rows in range(5, 9))


@compiled(
    "void(uint16[:,::1], int64[::1], int64, int64, uint16[:,::1], int64, uint16[:,::1], int64)"
)
def _multiply_few(
    source: _Bits,
    row_N: _Ints,
    first: int,
    rows: int,
    weight: _Bits,
    column: int,
    out: _Bits,
    place: int,
) -> None:
    """Seven rows or fewer, or none."""
    if rows == 1:
        _tile_1(source, row_N, first, weight, column, out, place)
    elif rows == 2:
        _tile_2(source, row_N, first, weight, column, out, place)
    elif rows == 3:
        _tile_3(source, row_N, first, weight, column, out, place)
    elif rows == 4:
        _tile_4(source, row_N, first, weight, column, out, place)
    elif rows == 5:
        _tile_5(source, row_N, first, weight, column, out, place)
    elif rows == 6:
        _tile_6(source, row_N, first, weight, column, out, place)
    elif rows == 7:
        _tile_7(source, row_N, first, weight, column, out, place)


@compiled(
    "void(uint16[:,::1], int64[::1], int64[::1], int64[::1], int64[::1], uint16[:,:,::1],"
    " uint16[:,::1], int64[::1])"
)
def multiply_rows(
    source: _Bits,
    row_N: _Ints,
    first_n: _Ints,
    size_n: _Ints,
    slot_n: _Ints,
    weight: _Bits,
    out: _Bits,
    place_n: _Ints,
) -> None:
    """Rows of several experts times their weights.

    Args:
        source: Rows [., K]; K is even.
        row_N: Which of them are multiplied.
        first_n: Where each expert's begin in ``row_N``.
        size_n: How many each expert has.
        slot_n: Where each expert's weights are.
        weight: [slots, K, N]; N is at least ``COLUMNS``.
        out: Receives rows [., N]; those of no expert are untouched.
        place_n: The first row of each expert there.
    """
    for n in range(len(slot_n)):
        expert = weight[slot_n[n]]
        width = expert.shape[1]
        for start in range(0, width, COLUMNS):
            # The last tile may compute some columns once more, with the same result.
            column = min(start, width - COLUMNS)
            first, place, left = first_n[n], place_n[n], size_n[n]
            while left >= 8:
                _tile_8(source, row_N, first, expert, column, out, place)
                first += 8
                place += 8
                left -= 8
            _multiply_few(source, row_N, first, left, expert, column, out, place)
