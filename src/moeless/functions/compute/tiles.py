"""Register tiles: the inner loops of matrix products on a CPU, as LLVM code for numba.

A tile multiplies a few rows by one panel of a weight matrix (``panels``) and keeps all sums in
registers while the panel passes by once. Every element is summed over ascending inputs from zero,
whatever the number of rows in the tile: **a row's result does not depend on the rows beside it**.

There is one way for float32 weights and one for bfloat16 weights on a processor, the first of
these that it has:

- ``amx``: AMX's tile registers, inputs in bfloat16;
- ``dot``: AVX-512's products of pairs of bfloat16;
- ``wide``: weights widened to float32 in registers, inputs in float32: any processor.

The vectors are as wide as the processor's; LLVM cuts them where they are not. This module must not
know what is multiplied, nor threads.
"""

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
import numba
import numba.core.cgutils
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moeless.core.processor import this_processor

COLUMNS: Final = 32
"""Outputs of a panel."""
AMX_ROWS: Final = 32
"""Rows of the largest AMX tile."""
AMX_DEPTH: Final = 32
"""Inputs that AMX multiplies at once: as many elements of a row are read, beyond its end too."""

_PREFETCHING_ROWS: Final = 4
"""Tiles of so many rows compute for long enough that the next panel can come meanwhile."""
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18
_SYS_ARCH_PRCTL: Final = 158
"""Linux on x86-64: a process asks once for leave to use AMX's registers."""

cgutils: Any = numba.core.cgutils  # has no types
_config: Any = numba.config


def _features() -> dict[str, bool]:
    """What the compiler may use: nothing special where somebody chose another processor for it."""
    if _config.CPU_NAME or _config.CPU_FEATURES:
        return {}
    return dict(llvm.get_host_cpu_features())


LANES: Final = 16 if _features().get("avx512f") else 8
"""Floats of a vector."""
MOST_ROWS: Final = 12 if LANES == 16 else 6
"""Rows of the largest tile: with two vectors of sums each they leave registers for the rest."""


@cache
def bfloat16_way() -> str:
    """How bfloat16 weights are multiplied on this processor: ``amx``, ``dot`` or ``wide``."""
    if amx_works():
        return "amx"
    return "dot" if dot_works() else "wide"


def amx_works() -> bool:
    """Whether there are AMX's registers, and the system lets us use them."""
    if not (this_processor().has_amx and _features().get("amx-bf16")):
        return False
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    granted: int = syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return granted == 0


def dot_works() -> bool:
    """Whether there is ``avx512_bf16``, and the compiler takes it."""
    # Its operands need a type that llvmlite does not know; another llvmlite may not take ours.
    has_dot = this_processor().has_bfloat16_dot and _features().get("avx512bf16")
    return bool(has_dot) and _bfloat_vector() is not None


@cache
def _bfloat_vector() -> ir.VectorType | None:
    """LLVM's vector of bfloat, which llvmlite lacks; None where it cannot be made."""
    base: Any = getattr(ir.types, "_BaseFloatType", None)
    if base is None:
        return None

    def name(_self: object) -> str:
        return "bfloat"

    fields = {"null": "0.0", "intrinsic_name": "bf16", "__str__": name}
    try:
        bfloat: Any = type("_BFloat", (base,), fields)
        bfloat._create_instance()
        return ir.VectorType(bfloat(), 2 * LANES)
    except (AttributeError, TypeError):
        return None


def source_stamp(*files: Path) -> str:
    """What names the code of some files and of this one.

    Machine code that was kept is found again by the file of its function alone; what closes over
    this, too, is made anew when code changes that it was made of.
    """
    sources = (Path(__file__), *files)
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, value, _I32(0))
    order = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, undefined, order)


def _vector(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * LANES)


def _make_tile(way: str, rows: int, panels: int) -> Any:
    """A function that multiplies so many rows by so many panels.

    It takes addresses and sizes in bytes as integers: ``(x, x_stride, weight, panel_bytes, depth,
    half, sums)``. ``depth`` counts inputs (pairs of them for bfloat16 weights), ``half`` is the
    byte offset of the vectors of each panel that are computed (a vector narrower than half a panel
    computes it in two calls), and sums are float32 [rows, panels * 32].
    """

    @intrinsic
    def tile(
        _typing: Any,
        x: Any,
        x_stride: Any,
        weight: Any,
        panel_bytes: Any,
        depth: Any,
        half: Any,
        sums: Any,
    ) -> Any:
        signature = types.void(*[types.int64] * 7)
        return signature, lambda context, builder, _, args: _emit(
            context, builder, args, way, rows, panels
        )

    return tile


def _emit(context: Any, builder: Any, args: Any, way: str, rows: int, panels: int) -> Any:
    """The tile's code: one pass over the panels' rows."""
    x, x_stride, weight, panel_bytes, depth, half, sums = args
    inputs = [builder.add(x, builder.mul(x_stride, _I64(row))) for row in range(rows)]
    # A panel's vectors: one of its first 16 columns and one of its last 16.
    starts = [
        builder.add(builder.add(weight, builder.mul(panel_bytes, _I64(panel))), offset)
        for panel in range(panels)
        for offset in (half, builder.add(half, _I64(2 * COLUMNS)))
    ]
    total = [[cgutils.alloca_once(builder, _FLOATS) for _ in starts] for _ in range(rows)]
    for one in total:
        for slot in one:
            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), slot)

    step = {"float32": _step_float32, "wide": _step_wide, "dot": _step_dot}[way]
    with cgutils.for_range(builder, depth) as loop:
        below = builder.mul(loop.index, _I64(4 * COLUMNS))
        kind = _FLOATS if way == "float32" else _WORDS
        loaded = [_load(builder, builder.add(start, below), kind) for start in starts]
        if rows >= _PREFETCHING_ROWS:
            for start in starts:
                _prefetch(builder, builder.add(builder.add(start, panel_bytes), below))
        words = 2 if way == "wide" else 1
        across = builder.mul(loop.index, _I64(4 * words))
        step(builder, [builder.add(start, across) for start in inputs], loaded, total)

    for row in range(rows):
        place = builder.add(sums, _I64(row * panels * 4 * COLUMNS))
        for which, slot in enumerate(total[row]):
            offset = builder.add(half, _I64(which * 2 * COLUMNS))
            target = _pointer(builder, builder.add(place, offset), _FLOATS)
            builder.store(builder.load(slot), target, align=4)
    return context.get_dummy_value()


def _prefetch(builder: Any, address: Any) -> None:
    """Have a line brought into the second cache."""
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, pointer), _I32(0), _I32(2), _I32(1)])


def _add_products(builder: Any, spread: Any, weights: Any, total: Any) -> None:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    for slot, weight in zip(total, weights, strict=True):
        builder.store(builder.call(fma, [spread, weight, builder.load(slot)]), slot)


def _step_float32(builder: Any, inputs: Any, loaded: Any, total: Any) -> None:
    for start, sums in zip(inputs, total, strict=True):
        value = _load(builder, start, _F32)
        _add_products(builder, _splat(builder, value, _FLOATS), loaded, sums)


def _step_wide(builder: Any, inputs: Any, loaded: Any, total: Any) -> None:
    """A pair of weights in each word: the lower half, then the upper one."""
    lower = [builder.bitcast(builder.shl(words, _vector(16)), _FLOATS) for words in loaded]
    upper = [
        builder.bitcast(builder.and_(words, _vector(0xFFFF0000)), _FLOATS) for words in loaded
    ]
    _step_float32(builder, inputs, lower, total)
    _step_float32(builder, [builder.add(start, _I64(4)) for start in inputs], upper, total)


def _step_dot(builder: Any, inputs: Any, loaded: Any, total: Any) -> None:
    bfloats = _bfloat_vector()
    kind = ir.FunctionType(_FLOATS, [_FLOATS, bfloats, bfloats])
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    weights = [builder.bitcast(words, bfloats) for words in loaded]
    for start, sums in zip(inputs, total, strict=True):
        pair = _load(builder, start, _I32)
        spread = builder.bitcast(_splat(builder, pair, _WORDS), bfloats)
        for slot, weight in zip(sums, weights, strict=True):
            builder.store(builder.call(dot, [builder.load(slot), spread, weight]), slot)


def make_tiles(way: str) -> tuple[Any, ...]:
    """The tiles of one way: of 1 to 6, 8 and 12 rows, of 1 to 3 by two panels, of 1 by four.

    Few rows go through several panels at once: one chain of sums would wait for itself.
    """
    sizes = [(rows, 1) for rows in (1, 2, 3, 4, 5, 6, 8, 12)] + [(1, 2), (2, 2), (3, 2), (1, 4)]
    return tuple(_make_tile(way, rows, panels) for rows, panels in sizes)


def _make_amx_tile(rows: int, panels: int) -> Any:
    """A function that multiplies 16 or 32 rows by one panel or two with AMX.

    It takes ``(x, x_stride, weight, panel_bytes, steps, sums)``: rows as configured
    (``configure_amx``), ``steps`` of 32 inputs each, sums float32 [rows, panels * 32].
    """
    groups = rows // 16

    @intrinsic
    def tile(
        _typing: Any, x: Any, x_stride: Any, weight: Any, panel_bytes: Any, steps: Any, sums: Any
    ) -> Any:
        signature = types.void(*[types.int64] * 6)
        return signature, lambda context, builder, _, args: _emit_amx(
            context, builder, args, groups, panels
        )

    return tile


def _amx_function(builder: Any, name: str, kinds: list[Any]) -> Any:
    kind = ir.FunctionType(ir.VoidType(), kinds)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")


def _emit_amx(context: Any, builder: Any, args: Any, groups: int, panels: int) -> Any:
    x, x_stride, weight, panel_bytes, steps, sums = args
    pointer = _I8.as_pointer()
    load = _amx_function(builder, "tileloadd64", [_I8, pointer, _I64])
    zero = _amx_function(builder, "tilezero", [_I8])
    multiply = _amx_function(builder, "tdpbf16ps", [_I8, _I8, _I8])
    store = _amx_function(builder, "tilestored64", [_I8, pointer, _I64])
    columns = 2 * panels
    # Registers: sums of each group of rows and 16 columns, then a group's inputs, then weights.
    total = [[group * columns + column for column in range(columns)] for group in range(groups)]
    for one in total:
        for register in one:
            builder.call(zero, [_I8(register)])
    first_input = groups * columns
    weights_in = [first_input + groups + which % 2 for which in range(columns)]
    with cgutils.for_range(builder, steps) as loop:
        across = builder.mul(loop.index, _I64(2 * AMX_DEPTH))
        below = builder.mul(loop.index, _I64(AMX_DEPTH // 2 * 4 * COLUMNS))
        for group in range(groups):
            start = builder.add(x, builder.mul(x_stride, _I64(16 * group)))
            source = builder.inttoptr(builder.add(start, across), pointer)
            builder.call(load, [_I8(first_input + group), source, x_stride])
        for column in range(columns):
            panel = builder.add(weight, builder.mul(panel_bytes, _I64(column // 2)))
            place = builder.add(builder.add(panel, below), _I64(column % 2 * 2 * COLUMNS))
            source = builder.inttoptr(place, pointer)
            register = weights_in[column]
            builder.call(load, [_I8(register), source, _I64(4 * COLUMNS)])
            for group in range(groups):
                operands = [total[group][column], first_input + group, register]
                builder.call(multiply, [_I8(operand) for operand in operands])
    width = panels * 4 * COLUMNS
    for group in range(groups):
        for column in range(columns):
            place = builder.add(sums, _I64(16 * group * width + column * 2 * COLUMNS))
            target = builder.inttoptr(place, pointer)
            builder.call(store, [_I8(total[group][column]), target, _I64(width)])
    return context.get_dummy_value()


amx_32 = _make_amx_tile(32, 1)
amx_16 = _make_amx_tile(16, 1)
amx_16_2 = _make_amx_tile(16, 2)


@intrinsic
def configure_amx(_typing: Any, config: Any) -> Any:
    """Set the shapes of AMX's registers from 64 bytes at an address; sums are lost."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        load = _amx_function(builder, "ldtilecfg", [_I8.as_pointer()])
        builder.call(load, [builder.inttoptr(args[0], _I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def release_amx(_typing: Any) -> Any:
    """Say that AMX's registers are no longer in use."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.call(_amx_function(builder, "tilerelease", []), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def fetch_add(_typing: Any, address: Any, value: Any) -> Any:
    """Add to an int64 at an address in one step with other threads; its value before."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


def _make_view(kind: Any, element: Any) -> Any:
    @intrinsic
    def view(_typing: Any, address: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], element.as_pointer())

        pointer: Any = types.CPointer
        return pointer(kind)(types.int64), emit

    return view


floats_at = _make_view(types.float32, _F32)
doubles_at = _make_view(types.float64, ir.DoubleType())
halves_at = _make_view(types.uint16, ir.IntType(16))
words_at = _make_view(types.uint32, _I32)
integers_at = _make_view(types.int64, _I64)
bytes_at = _make_view(types.uint8, _I8)


HALF: Final = COLUMNS // 2
_SUMS = ir.VectorType(_F32, HALF)
_SUM_BITS = ir.VectorType(_I32, HALF)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_SUMS, [value] * HALF)


def _bits(value: int) -> ir.Constant:
    return ir.Constant(_SUM_BITS, [value] * HALF)


def _store_sums(builder: Any, sums: Any, address: Any, *, halves: bool) -> None:
    """Sixteen floats to an address, or the nearest bfloat16 of each, ties to even."""
    if not halves:
        builder.store(sums, _pointer(builder, address, _SUMS), align=4)
        return
    bits = builder.bitcast(sums, _SUM_BITS)
    upper = builder.lshr(bits, _bits(16))
    up = builder.add(_bits(0x7FFF), builder.and_(upper, _bits(1)))
    rounded = builder.lshr(builder.add(bits, up), _bits(16))
    no_number = builder.fcmp_unordered("uno", sums, sums)
    rounded = builder.select(no_number, builder.or_(upper, _bits(0x40)), rounded)
    short = ir.VectorType(ir.IntType(16), HALF)
    builder.store(builder.trunc(rounded, short), _pointer(builder, address, short), align=2)


def _exp(builder: Any, x: Any) -> Any:
    """exp(x), with an error of some units in the last place.

    It is 2^k times 2^f with f from -1/2 to 1/2, the latter by a polynomial whose error is below
    2^-22. What is below the smallest normal number is that number.
    """
    module = builder.module

    def call(name: str, *values: Any) -> Any:
        kind = ir.FunctionType(_SUMS, [_SUMS] * len(values))
        function = cgutils.get_or_insert_function(module, kind, f"llvm.{name}.v{HALF}f32")
        return builder.call(function, list(values))

    power = builder.fmul(x, _floats(1.4426950408889634))
    power = call("minnum", call("maxnum", power, _floats(-126.0)), _floats(127.0))
    whole = call("floor", builder.fadd(power, _floats(0.5)))
    f = builder.fsub(power, whole)
    p = _floats(1.5353362e-4)
    for factor in (1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0):
        p = call("fmuladd", p, f, _floats(factor))
    exponent = builder.add(builder.fptosi(whole, _SUM_BITS), _bits(127))
    scale = builder.bitcast(builder.shl(exponent, _bits(23)), _SUMS)
    return builder.fmul(p, scale)


def _sigmoid(builder: Any, x: Any) -> Any:
    power = _exp(builder, builder.fsub(_floats(-0.0), x))
    return builder.fdiv(_floats(1.0), builder.fadd(_floats(1.0), power))


def _make_store(*, gated: bool, halves: bool) -> Any:
    """A function ``(sums, out)`` of addresses that stores a row of a panel.

    Either its 32 sums, or SiLU of the first 16 times the others; as float32 or bfloat16.
    """

    @intrinsic
    def store(_typing: Any, sums: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            at = [args[0], builder.add(args[0], _I64(4 * HALF))]
            first, second = (_load(builder, address, _SUMS) for address in at)
            if gated:
                gate = builder.fmul(first, _sigmoid(builder, first))
                _store_sums(builder, builder.fmul(gate, second), args[1], halves=halves)
            else:
                _store_sums(builder, first, args[1], halves=halves)
                behind = builder.add(args[1], _I64((2 if halves else 4) * HALF))
                _store_sums(builder, second, behind, halves=halves)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return store


store_floats = _make_store(gated=False, halves=False)
store_halves = _make_store(gated=False, halves=True)
silu_floats = _make_store(gated=True, halves=False)
silu_halves = _make_store(gated=True, halves=True)


@intrinsic
def sigmoid(_typing: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) of one float32, to the bit as the vectors have it."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        one = builder.insert_element(_floats(0.0), args[0], _I32(0))
        return builder.extract_element(_sigmoid(builder, one), _I32(0))

    return types.float32(types.float32), emit


@intrinsic
def exp_of_16(_typing: Any, address: Any, highest: Any) -> Any:
    """Replace 16 floats at an address by exp(x - highest)."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        order = ir.Constant(ir.VectorType(_I32, HALF), [0] * HALF)
        one = builder.insert_element(_floats(0.0), args[1], _I32(0))
        spread = builder.shuffle_vector(one, _floats(0.0), order)
        difference = builder.fsub(_load(builder, args[0], _SUMS), spread)
        _store_sums(builder, _exp(builder, difference), args[0], halves=False)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit
