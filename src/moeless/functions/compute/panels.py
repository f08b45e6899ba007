"""Matrix products on a CPU: weights in panels of 32 outputs, rows that depend on no other.

A panel holds all inputs of 32 outputs, one input after the other (bfloat16: one pair of inputs),
so a product reads its weights once and in their order. All ways to multiply (``tiles``) read the
same layout. A product is cut into tasks (some rows by some panels) that threads take as they come;
each element is computed by one of them, in one order, whoever it is: results depend neither on the
number of threads nor on which rows are multiplied together.

Several threads work on a product where that pays (``team``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numba
import numpy as np
import torch
from numba import types
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from moeless.functions.compute.team import run_together, team_size
from moeless.functions.compute.tiles import (
    AMX_DEPTH,
    AMX_ROWS,
    COLUMNS,
    HALF,
    LANES,
    MOST_ROWS,
    amx_16,
    amx_16_2,
    amx_32,
    bfloat16_way,
    bytes_at,
    configure_amx,
    doubles_at,
    fetch_add,
    floats_at,
    halves_at,
    integers_at,
    make_tiles,
    release_amx,
    sigmoid,
    silu_floats,
    silu_halves,
    source_stamp,
    store_floats,
    store_halves,
    words_at,
)
from moeless.policies.kernels.compiled import compiled, compiled_callback

_numba: Any = numba  # has few types
carray = _numba.carray
_config = _numba.config
_inlined = _numba.njit(nogil=True)
_SLACK_BYTES: Final = AMX_DEPTH // 2 * 4 * COLUMNS
"""What AMX may read beyond the last panel."""
_BLOCK_BYTES: Final = 1024 << 10
"""Rows that a task multiplies at once stay in the second cache beside a panel."""
_TASKS_PER_THREAD: Final = 2
_PLANNED: Final = 512
"""Numbers of rows and shapes whose products are described once."""
_ALONE_MACS: Final = 3e5
"""Multiplications up to which a second thread costs more than it brings."""

# What a product is told, int64 each.
_NEXT, _TASKS, _THREAD, _SCRATCH, _SCRATCH_BYTES = 0, 1, 2, 3, 4
_X, _X_STRIDE, _X_HALVES, _INDEX, _SEGMENTS = 5, 6, 7, 8, 9
_DEPTH, _ROW_ELEMENTS, _PANELS, _GROUP, _BLOCK = 10, 11, 12, 13, 14
_OUT, _OUT_STRIDE, _OUT_HALVES, _WIDTH, _MODE, _PARAMETERS = 15, 16, 17, 18, 19, 20
_FEW_4, _FEW_2, _PANEL_BYTES, _COUNT, _BLOCK_ROOM, _HERE = 21, 22, 23, 24, 25, 26
_FIELDS: Final = 27
# Of each segment: its weights and biases (addresses), where its rows begin in the index and among
# the outputs, how many they are, and its tasks.
_WEIGHT, _BIAS, _FIRST, _PLACE, _ROWS, _SHARE = 0, 1, 2, 3, 4, 5

PLAIN: Final = 0
GATED_MODES: Final = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "swiglu_clamped": 5}


@_inlined
def _gate(mode, g, u, alpha, limit):
    """One gate times its up, of all modes but SiLU."""
    one, half = np.float32(1.0), np.float32(0.5)
    if mode == 2:
        return half * g * (one + np.float32(math.erf(g * np.float32(0.7071067811865476)))) * u
    if mode == 3:
        z = np.float32(0.7978845608028654) * (g + np.float32(0.044715) * g * g * g)
        return g * sigmoid(z + z) * u
    if mode == 4:
        return (g if g > np.float32(0.0) or g != g else np.float32(0.0)) * u
    g = min(g, limit)
    u = min(max(u, -limit), limit)
    return (u + one) * (g * sigmoid(g * alpha))


@_inlined
def _prepare(d, sums, bias, rows, panel, panels):
    """Add biases; of gates and ups other than SiLU's, put what comes of them in both halves."""
    across = panels * COLUMNS
    total = carray(floats_at(sums), (rows, across))
    if bias:
        biases = carray(floats_at(bias), ((panel + panels) * COLUMNS,))
        for row in range(rows):
            for c in range(across):
                total[row, c] += biases[panel * COLUMNS + c]
    mode = d[_MODE]
    if mode > 1:
        parameters = carray(doubles_at(d[_PARAMETERS]), (2,))
        alpha, limit = np.float32(parameters[0]), np.float32(parameters[1])
        for row in range(rows):
            for p in range(panels):
                for j in range(p * COLUMNS, p * COLUMNS + HALF):
                    total[row, j] = _gate(mode, total[row, j], total[row, j + HALF], alpha, limit)


@_inlined
def _store_panel(d, source, target, count, spare):
    """Store a row of a panel: whole, or the first ``count`` columns by way of ``spare``."""
    gated, halves = d[_MODE] == 1, d[_OUT_HALVES]
    size = 2 if halves else 4
    whole = HALF if d[_MODE] else COLUMNS
    out = target if count >= whole and d[_MODE] < 2 else spare
    if gated:
        if halves:
            silu_halves(source, out)
        else:
            silu_floats(source, out)
    elif halves:
        store_halves(source, out)
    else:
        store_floats(source, out)
    if out != target:
        kept, wanted = carray(halves_at(spare), (64,)), carray(halves_at(target), (64,))
        for i in range(min(count, whole) * size // 2):
            wanted[i] = kept[i]


@_inlined
def _store(d, sums, bias, rows, panel, panels, place, spare):
    """Sums of some rows and panels to the output: with biases, or gates times ups."""
    if bias or d[_MODE] > 1:
        _prepare(d, sums, bias, rows, panel, panels)
    per_panel = HALF if d[_MODE] else COLUMNS
    size = 2 if d[_OUT_HALVES] else 4
    for row in range(rows):
        for p in range(panels):
            column = (panel + p) * per_panel
            target = d[_OUT] + ((place + row) * d[_OUT_STRIDE] + column) * size
            source = sums + (row * panels + p) * 4 * COLUMNS
            _store_panel(d, source, target, d[_WIDTH] - column, spare)


@_inlined
def _height(rows):
    """Rows of the largest tile for so many."""
    if MOST_ROWS >= 12:
        if rows >= 12:
            return 12
        if rows >= 8:
            return 8
    return min(rows, 6)


@_inlined
def _take_rows(d, first, rows, block, as_halves):
    """Address of input rows in the form that tiles multiply: where they are, or copied to a block.

    A copy has zeros behind each row.
    """
    depth, elements, stride = d[_DEPTH], d[_ROW_ELEMENTS], d[_X_STRIDE]
    size = 2 if d[_X_HALVES] else 4
    if not d[_INDEX] and elements == stride and (as_halves or not d[_X_HALVES]):
        return d[_X] + first * stride * size
    index = carray(integers_at(d[_INDEX]), (first + rows,))
    for row in range(rows):
        source = d[_X] + (index[first + row] if d[_INDEX] else first + row) * stride * size
        if as_halves:
            halves = carray(halves_at(source), (depth,))
            kept = carray(halves_at(block + row * elements * 2), (elements,))
            for k in range(depth):
                kept[k] = halves[k]
            for k in range(depth, elements):
                kept[k] = 0
        elif d[_X_HALVES]:
            halves = carray(halves_at(source), (depth,))
            words = carray(words_at(block + row * elements * 4), (elements,))
            for k in range(depth):
                words[k] = np.uint32(halves[k]) << np.uint32(16)
            for k in range(depth, elements):
                words[k] = 0
        else:
            given = carray(words_at(source), (depth,))
            words = carray(words_at(block + row * elements * 4), (elements,))
            for k in range(depth):
                words[k] = given[k]
            for k in range(depth, elements):
                words[k] = 0
    return block


def _inlined_as(way, function):
    """Compile a function with its way in its name: kept machine code is linked by names."""
    function.__name__ = f"{function.__name__}_{way}"
    function.__qualname__ = f"{function.__qualname__}_{way}"
    return _inlined(function)


def _make_work(way, multiply, as_halves):
    """A function that takes tasks until there are none."""

    def work(d):
        base = d[_SCRATCH] + fetch_add(d[_HERE] + 8 * _THREAD, 1) * d[_SCRATCH_BYTES]
        block_at, config, spare = base + 192, base, base + 64
        sums = block_at + d[_BLOCK_ROOM]
        segments = carray(integers_at(d[_SEGMENTS]), (d[_COUNT], 6))
        panels, group, most = d[_PANELS], d[_GROUP], d[_BLOCK]
        groups = (panels + group - 1) // group
        panel_bytes = d[_PANEL_BYTES]
        n, taken, x = 0, -1, block_at
        began = 0  # the tasks of the segments before
        while True:
            task = fetch_add(d[_HERE] + 8 * _NEXT, 1)
            if task >= d[_TASKS]:
                break
            while task - began >= segments[n, _SHARE]:
                began += segments[n, _SHARE]
                n += 1
                taken = -1
            part = (task - began) % groups
            block = (task - began) // groups
            rows = min(most, segments[n, _ROWS] - block * most)
            place = segments[n, _PLACE] + block * most
            if block != taken:
                first = segments[n, _FIRST] + block * most
                x = _take_rows(d, first, rows, block_at, as_halves)
                taken = block
            panel = part * group
            last = min(panel + group, panels)
            while panel < last:
                at_once = 1
                if rows <= d[_FEW_4] and panel + 4 <= last:
                    at_once = 4
                elif rows <= d[_FEW_2] and panel + 2 <= last:
                    at_once = 2
                weight = segments[n, _WEIGHT] + panel * panel_bytes
                multiply(d, x, weight, rows, at_once, sums, config)
                _store(d, sums, segments[n, _BIAS], rows, panel, at_once, place, spare)
                panel += at_once

    return _inlined_as(way, work)


def _make_multiply(way, size):
    t1, t2, t3, t4, t5, t6, t8, t12, t1_2, t2_2, t3_2, t1_4 = make_tiles(way)

    def multiply_few(x, stride, weight, panel_bytes, depth, half, out, rows, panels):
        if panels == 4:
            t1_4(x, stride, weight, panel_bytes, depth, half, out)
        elif rows == 1:
            t1_2(x, stride, weight, panel_bytes, depth, half, out)
        elif rows == 2:
            t2_2(x, stride, weight, panel_bytes, depth, half, out)
        else:
            t3_2(x, stride, weight, panel_bytes, depth, half, out)

    multiply_few = _inlined_as(way, multiply_few)

    def multiply(d, block, weight, rows, panels, sums, config):
        stride, panel_bytes = d[_ROW_ELEMENTS] * size, d[_PANEL_BYTES]
        depth = panel_bytes // (4 * COLUMNS)
        half = 0
        while half < 2 * COLUMNS:
            if panels > 1:
                multiply_few(block, stride, weight, panel_bytes, depth, half, sums, rows, panels)
                half += 4 * LANES
                continue
            row = 0
            while row < rows:
                height = _height(rows - row)
                x, out = block + row * stride, sums + row * 4 * COLUMNS
                if MOST_ROWS >= 12 and height == 12:
                    t12(x, stride, weight, panel_bytes, depth, half, out)
                elif MOST_ROWS >= 12 and height == 8:
                    t8(x, stride, weight, panel_bytes, depth, half, out)
                elif height == 6:
                    t6(x, stride, weight, panel_bytes, depth, half, out)
                elif height == 5:
                    t5(x, stride, weight, panel_bytes, depth, half, out)
                elif height == 4:
                    t4(x, stride, weight, panel_bytes, depth, half, out)
                elif height == 3:
                    t3(x, stride, weight, panel_bytes, depth, half, out)
                elif height == 2:
                    t2(x, stride, weight, panel_bytes, depth, half, out)
                elif height == 1:
                    t1(x, stride, weight, panel_bytes, depth, half, out)
                row += height
            half += 4 * LANES

    return _inlined_as(way, multiply)


@_inlined
def _configure(config, rows, first_weight):
    """Registers below the weights' have so many rows, those and all after them 16."""
    settings = carray(bytes_at(config), (64,))
    for i in range(64):
        settings[i] = 0
    settings[0] = 1
    for register in range(8):
        settings[16 + 2 * register] = 64
        settings[48 + register] = rows if register < first_weight else 16
    configure_amx(config)


@_inlined
def _multiply_amx(d, block, weight, rows, panels, sums, config):
    stride, panel_bytes = d[_ROW_ELEMENTS] * 2, d[_PANEL_BYTES]
    steps = d[_ROW_ELEMENTS] // AMX_DEPTH
    if panels == 2:
        _configure(config, rows, 5)
        amx_16_2(block, stride, weight, panel_bytes, steps, sums)
        return
    x, out, left = block, sums, rows
    if left >= 32:
        _configure(config, 16, 6)
        while left >= 32:
            amx_32(x, stride, weight, panel_bytes, steps, out)
            x += 32 * stride
            out += 32 * 4 * COLUMNS
            left -= 32
    while left > 0:
        _configure(config, min(left, 16), 3)
        amx_16(x, stride, weight, panel_bytes, steps, out)
        x += 16 * stride
        out += 16 * 4 * COLUMNS
        left -= 16


_work_float32 = _make_work("float32", _make_multiply("float32", 4), as_halves=False)
_work_wide = _make_work("wide", _make_multiply("wide", 4), as_halves=False)
_work_dot = _make_work("dot", _make_multiply("dot", 2), as_halves=True)
_work_amx = _make_work("amx", _multiply_amx, as_halves=True)


def _runs(stamp: str) -> dict[str, Callable[[Any], None]]:
    """What threads run, by way. Machine code that was kept is found again by the stamp, too."""

    def run_float32(pointer):
        if stamp:
            _work_float32(carray(pointer, (_FIELDS,)))

    def run_wide(pointer):
        if stamp:
            _work_wide(carray(pointer, (_FIELDS,)))

    def run_dot(pointer):
        if stamp:
            _work_dot(carray(pointer, (_FIELDS,)))

    def run_amx(pointer):
        if stamp:
            _work_amx(carray(pointer, (_FIELDS,)))
            release_amx()

    return {"float32": run_float32, "wide": run_wide, "dot": run_dot, "amx": run_amx}


class Way(NamedTuple):
    """One way to multiply, compiled.

    Args:
        name: As ``tiles`` has it.
        code: What the compiler made; ``run`` is in it.
        run: What threads call with the address of a descriptor.
        halves: Inputs are multiplied as bfloat16, not as float32.
        depth_unit: Inputs of a row are padded with zeros to a multiple of this.
        rows_unit: Blocks of rows are multiples of this.
        few_4: Rows up to which four panels are multiplied at once.
        few_2: The same of two.
    """

    name: str
    code: Any
    run: int
    halves: bool
    depth_unit: int
    rows_unit: int
    few_4: int
    few_2: int


@cache
def _way(name: str) -> Way:
    signature = types.void(types.CPointer(types.int64))
    code = compiled_callback(signature, _runs(source_stamp(Path(__file__)))[name])
    common = {"name": name, "code": code, "run": code.address}
    common |= {"rows_unit": MOST_ROWS, "few_4": 1, "few_2": 3}
    if name == "amx":
        common |= {"rows_unit": AMX_ROWS, "few_4": 0, "few_2": 16}
    units = {"float32": 1, "wide": 2, "dot": 2, "amx": AMX_DEPTH}
    return Way(**common, halves=name in ("dot", "amx"), depth_unit=units[name])


def can_lay_out(dtype: str) -> bool:
    """Whether weights of a dtype can lie in panels, if the compiler takes the code.

    Args:
        dtype: A torch dtype's name.
    """
    return dtype in ("float32", "bfloat16") and not _config.DISABLE_JIT


@cache
def way_for(dtype: str) -> Way | None:
    """How weights of a dtype are multiplied here; None where they are not.

    Compiles it the first time, and makes sure that it multiplies.

    Args:
        dtype: A torch dtype's name.
    """
    if not can_lay_out(dtype):
        return None
    try:
        way = _way("float32" if dtype == "float32" else bfloat16_way())
        return way if _multiplies(way, dtype) else None
    except (ImportError, RuntimeError, NumbaError):
        return None  # another llvmlite or LLVM, which does not know the code in this form


def _multiplies(way: Way, dtype: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, generator=generator) for size in ((37, 46), (70, 46)))
    x, w = x.to(getattr(torch, dtype)), w.to(getattr(torch, dtype))
    y = Products(way).linear(x, PanelMatrix.of(w), threads=1)
    error = (y.double() - x.double() @ w.double().t()).abs().max()
    return bool(error < (1e-4 if dtype == "float32" else 0.3))


@compiled("void(uint32[:,:], uint32[:,:,::1], int64, int64, int64)")
def _lay_out(rows_NK, panels, begin, per_panel, column):
    """Copy the words of rows to panels: so many rows to each, from a column of it on.

    Args:
        rows_NK: Words of some rows.
        panels: [panels, K, COLUMNS].
        begin: Which row of the matrix the first of them is.
        per_panel: Rows that a panel takes.
        column: Where in a panel they begin.
    """
    count, width = rows_NK.shape
    for first in range(0, count, 16):
        for start in range(0, width, 16):
            for n in range(first, min(first + 16, count)):
                panel, place = (begin + n) // per_panel, column + (begin + n) % per_panel
                for k in range(start, min(start + 16, width)):
                    panels[panel, k, place] = rows_NK[n, k]


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelShape:
    """A weight matrix as it lies in panels.

    Args:
        width: Outputs N; where it is gated, of gates and of ups each.
        depth: Inputs K.
        dtype: ``float32`` or ``bfloat16``.
        gated: Each panel holds 16 gates and the ups that belong to them.
    """

    width: int
    depth: int
    dtype: str
    gated: bool = False

    @property
    def panels(self) -> int:
        """How many there are."""
        return -(-self.width // (HALF if self.gated else COLUMNS))

    @property
    def words(self) -> int:
        """Words of 32 bits that a panel has of each output."""
        return self.depth if self.dtype == "float32" else -(-self.depth // 2)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return self.words * COLUMNS * 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of all panels."""
        return self.panels * self.panel_bytes

    @property
    def slack_bytes(self) -> int:
        """Bytes behind them that may be read, too, and must be finite numbers."""
        return _SLACK_BYTES if self.dtype == "bfloat16" else 0


class PanelMatrix:
    """A weight matrix [N, K] in panels.

    Args:
        shape: What it is.
        memory: Zeroed bytes for it, at least the shape's ``weight_bytes`` and ``slack_bytes``.
    """

    def __init__(self, shape: PanelShape, memory: torch.Tensor) -> None:
        self.shape = shape
        self._memory = memory
        self.address = memory.data_ptr()
        used = memory[: shape.weight_bytes].numpy().view(np.uint32)
        self._words = used.reshape(shape.panels, shape.words, COLUMNS)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """A matrix in memory of its own.

        Args:
            weight: [N, K], float32 or bfloat16 on the CPU.
        """
        width, depth = weight.shape
        shape = PanelShape(
            width=width, depth=depth, dtype=str(weight.dtype).removeprefix("torch.")
        )
        num_bytes = shape.weight_bytes + shape.slack_bytes
        matrix = cls(shape, torch.zeros(num_bytes, dtype=torch.uint8))
        matrix.write(weight)
        return matrix

    def write(self, weight: torch.Tensor, *, begin: int = 0, ups: bool = False) -> None:
        """Lay rows out.

        Args:
            weight: [n, K] of the matrix' dtype on the CPU.
            begin: Which row of the matrix the first of them is.
            ups: They are ups, not gates.
        """
        rows = weight.contiguous()
        if self.shape.depth % 2 and rows.dtype == torch.bfloat16:
            rows = torch.nn.functional.pad(rows, (0, 1))
        per_panel = HALF if self.shape.gated else COLUMNS
        words = rows.view(torch.uint8).numpy().view(np.uint32)
        _lay_out(words, self._words, begin, per_panel, HALF if ups else 0)

    def rows(self, which: NDArray[np.int64]) -> torch.Tensor:
        """Some rows [n, K] of a matrix that is not gated.

        Args:
            which: Their numbers.
        """
        words = self._words[which // COLUMNS, :, which % COLUMNS]
        dtype = torch.float32 if self.shape.dtype == "float32" else torch.bfloat16
        return torch.from_numpy(words).view(dtype)[:, : self.shape.depth].contiguous()

    def read(self) -> torch.Tensor:
        """The weights [N, K], gates before ups where it is gated, in new memory."""
        shape = self.shape
        words = self._words.transpose(0, 2, 1)
        parts = [words[:, :HALF], words[:, HALF:]] if shape.gated else [words]
        rows = [
            np.ascontiguousarray(part).reshape(-1, shape.words)[: shape.width] for part in parts
        ]
        dtype = torch.float32 if shape.dtype == "float32" else torch.bfloat16
        return torch.from_numpy(np.concatenate(rows)).view(dtype)[:, : shape.depth].contiguous()


Segments = NDArray[np.int64]
"""What is multiplied by what, int64 [n, 6]: address of the weights, address of the biases (float32
in the order of the panels' columns, 0 for none), first row in the index, first row of the output,
rows, and one more column that is filled here."""


class Products:
    """Has rows multiplied. For one thread at a time.

    Args:
        way: How.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self._fields = np.zeros(_FIELDS, dtype=np.int64)
        self._parameters = np.zeros(2)
        self._scratch = np.zeros(0, dtype=np.uint8)
        self._scratch_at = 0
        self._planned: dict[Any, tuple[memoryview, memoryview, int, int, int]] = {}
        self._fields[_HERE] = self._address = self._fields.ctypes.data
        self._fields[_PARAMETERS] = self._parameters.ctypes.data
        self._fields[_FEW_4], self._fields[_FEW_2] = way.few_4, way.few_2
        self._sizes: dict[PanelShape, tuple[int, int, int]] = {}

    def linear(
        self,
        x: torch.Tensor,
        matrix: PanelMatrix,
        *,
        bias: torch.Tensor | None = None,
        mode: int = PLAIN,
        out_dtype: torch.dtype | None = None,
        threads: int | None = None,
    ) -> torch.Tensor:
        """Rows times a matrix, plus a bias.

        Args:
            x: Contiguous rows [n, K], of the matrix' dtype or float32 where the way takes it.
            matrix: [N, K].
            bias: float32, of all the panels' columns.
            mode: ``PLAIN``, or what becomes of gates and ups; none that has parameters.
            out_dtype: float32 or bfloat16; that of the rows if it is None.
            threads: How many compute; torch's number if it is None.

        Returns:
            [n, N].
        """
        rows, shape = len(x), matrix.shape
        dtype = out_dtype or x.dtype
        out = torch.empty(rows, shape.width, dtype=dtype)
        if rows == 0:
            return out
        threads = threads or team_size()
        key = shape, rows, threads, bias is not None, mode, x.dtype, dtype
        planned = self._planned.get(key)
        if planned is None:
            planned = self._planned[key] = self._plan_linear(shape, x, threads, mode, dtype)
            while len(self._planned) > _PLANNED:
                del self._planned[next(iter(self._planned))]
        fields, segment, address, threads, room = planned
        if room > len(self._scratch):
            self._scratch = np.zeros(room, dtype=np.uint8)
            self._scratch_at = -(-self._scratch.ctypes.data // 64) * 64
        fields[_NEXT] = fields[_THREAD] = 0
        fields[_SCRATCH] = self._scratch_at
        fields[_X], fields[_OUT] = x.data_ptr(), out.data_ptr()
        segment[_WEIGHT] = matrix.address
        if bias is not None:
            segment[_BIAS] = bias.data_ptr()
        run_together(self.way.run, address, threads)
        return out

    def _plan_linear(
        self,
        shape: PanelShape,
        x: torch.Tensor,
        threads: int,
        mode: int,
        dtype: torch.dtype,
    ) -> tuple[memoryview, memoryview, int, int, int]:
        """A descriptor for the product of so many rows, to be used again and again."""
        segments = np.zeros((1, 6), dtype=np.int64)
        rows = segments[0, _ROWS] = len(x)
        fields = self._fields.copy()
        fields[_HERE] = fields.ctypes.data
        fields[_INDEX], fields[_MODE] = 0, mode
        threads, room = self._describe(
            fields, segments, shape, most_rows=rows, total_rows=rows, threads=threads
        )
        fields[_X_STRIDE], fields[_X_HALVES] = x.shape[1], x.dtype == torch.bfloat16
        fields[_OUT_STRIDE], fields[_OUT_HALVES] = shape.width, dtype == torch.bfloat16
        words: list[Any] = [fields, segments.reshape(-1)]
        views = memoryview(words[0]), memoryview(words[1])
        return *views, int(fields[_HERE]), threads, room

    def run(
        self,
        segments: Segments,
        shape: PanelShape,
        *,
        x: torch.Tensor,
        out: torch.Tensor,
        most_rows: int,
        total_rows: int,
        index: int = 0,
        mode: int = PLAIN,
        parameters: tuple[float, float] = (0.0, 0.0),
        threads: int | None = None,
    ) -> None:
        """Multiply the rows of several segments by matrices of one shape.

        Args:
            segments: Which; the last column is overwritten.
            shape: Of the matrices.
            x: Contiguous rows.
            out: Contiguous rows that receive the products; those of no segment are untouched.
            most_rows: Of one segment, at the most.
            total_rows: Of all segments.
            index: Address of the input row of each row, int64; 0 where they are the same.
            mode: ``PLAIN``, or what becomes of gates and ups.
            parameters: Slope and limit of clamped gates.
            threads: How many compute; torch's number if it is None.
        """
        d = self._fields
        threads, room = self._describe(
            d,
            segments,
            shape,
            most_rows=most_rows,
            total_rows=total_rows,
            threads=threads or team_size(),
        )
        if room > len(self._scratch):
            self._scratch = np.zeros(room, dtype=np.uint8)
            self._scratch_at = -(-self._scratch.ctypes.data // 64) * 64
        d[_NEXT] = d[_THREAD] = 0
        d[_SCRATCH] = self._scratch_at
        d[_X], d[_X_STRIDE], d[_X_HALVES] = x.data_ptr(), x.shape[1], x.dtype == torch.bfloat16
        d[_INDEX], d[_OUT], d[_OUT_STRIDE] = index, out.data_ptr(), out.shape[1]
        d[_OUT_HALVES], d[_MODE] = out.dtype == torch.bfloat16, mode
        self._parameters[:] = parameters
        run_together(self.way.run, self._address, threads)

    def _describe(
        self,
        d: NDArray[np.int64],
        segments: Segments,
        shape: PanelShape,
        *,
        most_rows: int,
        total_rows: int,
        threads: int,
    ) -> tuple[int, int]:
        """Cut a product into tasks; returns the threads and the bytes that they need."""
        way = self.way
        elements, row_bytes, block = self._sizes.get(shape) or self._plan(shape)
        if total_rows * shape.panels * COLUMNS * shape.depth <= _ALONE_MACS:
            threads = 1
        block = min(block, -(-most_rows // way.rows_unit) * way.rows_unit)
        blocks_n = -(-segments[:, _ROWS] // block)
        group = shape.panels
        if threads > 1:
            wanted = _TASKS_PER_THREAD * threads / max(1, int(blocks_n.sum()))
            group = max(1, int(group / max(1.0, wanted)))
        tasks_n = segments[:, _SHARE] = blocks_n * -(-shape.panels // group)
        room = -(-block * row_bytes // 64) * 64
        each = 192 + room + max(block * 4 * COLUMNS, 4096)
        d[_TASKS], d[_SCRATCH_BYTES], d[_BLOCK_ROOM] = tasks_n.sum(), each, room
        d[_SEGMENTS], d[_COUNT] = segments.ctypes.data, len(segments)
        d[_DEPTH], d[_ROW_ELEMENTS], d[_PANELS] = shape.depth, elements, shape.panels
        d[_GROUP], d[_BLOCK], d[_PANEL_BYTES] = group, block, shape.panel_bytes
        d[_WIDTH] = shape.width
        return threads, threads * each + 64

    def _plan(self, shape: PanelShape) -> tuple[int, int, int]:
        """Elements and bytes of a row as it is multiplied, and rows of a block."""
        way = self.way
        elements = -(-shape.depth // way.depth_unit) * way.depth_unit
        row_bytes = elements * (2 if way.halves else 4)
        block = max(1, _BLOCK_BYTES // row_bytes // way.rows_unit) * way.rows_unit
        self._sizes[shape] = elements, row_bytes, block
        return self._sizes[shape]
