"""Products in panels: right at every size in every way, and no row depends on another."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from moeless.core.processor import describe_processor
from moeless.functions.compute import panels, tiles
from moeless.functions.compute.panels import PanelMatrix, PanelShape, Products, way_for

WAYS = {"float32": "float32", "wide": "bfloat16", "dot": "bfloat16", "amx": "bfloat16"}


def compile_way(name):
    """The way, where this processor has it."""
    there = {"dot": tiles.dot_works, "amx": tiles.amx_works}.get(name, lambda: True)
    if not there():
        pytest.skip(f"this processor does not multiply by {name}")
    return panels._way(name)


@pytest.fixture(params=WAYS)
def way(request):
    return compile_way(request.param)


def draw(rows, columns, name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, WAYS[name])
    return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)


def check(y, x, weight, bias=None):
    wanted = x.double() @ weight.double().t()
    if bias is not None:
        wanted += bias.double()
    atol, rtol = (1e-5, 1e-5) if y.dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(y.double(), wanted, atol=atol, rtol=rtol)


SIZES = [(32, 32), (70, 46), (33, 7), (576, 48), (96, 200), (1, 1), (31, 64)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_right_whatever_the_rows_and_threads(way, size):
    weight = draw(*size, way.name)
    matrix, products = PanelMatrix.of(weight), Products(way)
    for rows in [*range(1, 20), 31, 32, 33, 50, 97, 300]:
        x = draw(rows, size[1], way.name, seed=rows)
        y = products.linear(x, matrix, threads=1)
        check(y, x, weight)
        assert torch.equal(products.linear(x, matrix, threads=2), y)


def test_a_rows_result_is_the_same_to_the_bit_beside_any_others(way):
    weight = draw(200, 330, way.name)
    matrix, products = PanelMatrix.of(weight), Products(way)
    x = draw(64, 330, way.name, seed=1)
    whole = products.linear(x, matrix)
    for rows in (1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 33, 40):
        for first in (0, 9, 20):
            part = products.linear(x[first : first + rows], matrix)
            assert torch.equal(part, whole[first : first + rows])


def test_a_row_without_finite_numbers_spoils_no_other(way):
    weight = draw(64, 40, way.name)
    matrix, products = PanelMatrix.of(weight), Products(way)
    x = draw(20, 40, way.name, seed=1)
    whole = products.linear(x, matrix)
    x[3] = float("nan")
    x[11] = float("inf")
    y = products.linear(x, matrix)
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(y[others], whole[others])
    assert torch.isnan(y[3]).all()
    assert not torch.isfinite(y[11]).any()


def test_biases_are_added_before_rounding(way):
    weight = draw(70, 64, way.name)
    matrix, products = PanelMatrix.of(weight), Products(way)
    bias = torch.zeros(matrix.shape.panels * tiles.COLUMNS)
    bias[:70] = torch.randn(70)
    for rows in (1, 3, 40):
        x = draw(rows, 64, way.name, seed=rows)
        check(products.linear(x, matrix, bias=bias), x, weight, bias[:70])


def test_no_rows_have_no_products(way):
    products = Products(way)
    y = products.linear(draw(0, 64, way.name), PanelMatrix.of(draw(40, 64, way.name)))
    assert y.shape == (0, 40)


def test_segments_take_their_rows_from_anywhere_and_leave_others_alone(way):
    weights = [draw(48, 64, way.name, seed=seed) for seed in range(3)]
    matrices, products = [PanelMatrix.of(weight) for weight in weights], Products(way)
    x = draw(30, 64, way.name, seed=9)
    index = torch.randint(30, (60,), generator=torch.Generator().manual_seed(2))
    out = torch.full((80, 48), 77.0, dtype=x.dtype)
    segments = np.zeros((3, 6), dtype=np.int64)
    for n, (first, place, rows) in enumerate([(5, 0, 1), (6, 20, 35), (45, 60, 12)]):
        segments[n] = [matrices[n].address, 0, first, place, rows, 0]
    products.run(
        segments,
        matrices[0].shape,
        x=x,
        index=index.data_ptr(),
        out=out,
        most_rows=35,
        total_rows=48,
        threads=2,
    )
    untouched = torch.ones(80, dtype=torch.bool)
    for n, (first, place, rows) in enumerate([(5, 0, 1), (6, 20, 35), (45, 60, 12)]):
        check(out[place : place + rows], x[index[first : first + rows]], weights[n])
        untouched[place : place + rows] = False
    assert (out[untouched] == 77.0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (70, 46), (33, 7), (48, 5)], ids=str)
def test_what_was_laid_out_reads_as_it_was(size, gated, dtype):
    width, depth = size
    weight = torch.randn((2 if gated else 1) * width, depth).to(getattr(torch, dtype))
    shape = PanelShape(width=width, depth=depth, dtype=dtype, gated=gated)
    memory = torch.zeros(shape.weight_bytes + shape.slack_bytes, dtype=torch.uint8)
    matrix = PanelMatrix(shape, memory)
    matrix.write(weight[:width])
    if gated:
        matrix.write(weight[width:], ups=True)
    assert torch.equal(matrix.read(), weight)


def test_rows_may_be_laid_out_a_few_at_a_time():
    weight = torch.randn(100, 24)
    whole = PanelMatrix.of(weight)
    shape = PanelShape(width=100, depth=24, dtype="float32")
    pieces = PanelMatrix(shape, torch.zeros(shape.weight_bytes, dtype=torch.uint8))
    for begin in (0, 40, 75):
        stop = {0: 40, 40: 75, 75: 100}[begin]
        pieces.write(weight[begin:stop], begin=begin)
    assert torch.equal(pieces.read(), whole.read())


@pytest.mark.parametrize(
    ("abilities", "wanted"),
    [({"amx", "dot"}, "amx"), ({"dot"}, "dot"), (set(), "wide")],
)
def test_the_first_way_that_works_is_taken(abilities, wanted, monkeypatch):
    monkeypatch.setattr(tiles, "amx_works", lambda: "amx" in abilities)
    monkeypatch.setattr(tiles, "dot_works", lambda: "dot" in abilities)
    assert tiles.bfloat16_way.__wrapped__() == wanted


def test_abilities_that_are_switched_off_are_not_used(monkeypatch):
    without = describe_processor(
        machine="x86_64",
        flags=frozenset({"avx512f", "amx_bf16", "avx512_bf16"}),
        environment={"MOELESS_WITHOUT": "amx-loops bfloat16-loops"},
    )
    monkeypatch.setattr(tiles, "this_processor", lambda: without)
    assert not tiles.amx_works()
    assert not tiles.dot_works()


def test_other_types_and_a_switched_off_compiler_have_no_way(monkeypatch):
    assert way_for("float16") is None
    monkeypatch.setattr(panels._config, "DISABLE_JIT", 1)
    way_for.cache_clear()
    try:
        assert way_for("float32") is None
    finally:
        way_for.cache_clear()


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_a_compiler_that_does_not_take_the_code_costs_speed_only(monkeypatch, error):
    def refuse(name):
        raise error(name)

    monkeypatch.setattr(panels, "_way", refuse)
    way_for.cache_clear()
    try:
        assert way_for("bfloat16") is None
    finally:
        way_for.cache_clear()


MULTIPLY = """
import sys, torch
from moeless.functions.compute import panels
for name in sys.argv[1:]:
    way = panels._way(name)
    dtype = "float32" if name == "float32" else "bfloat16"
    print(name, panels._multiplies(way, dtype))
"""


def test_machine_code_kept_by_several_processes_works_side_by_side(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run(*names):
        command = [sys.executable, "-c", MULTIPLY, *names]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=250
        ).stdout.split()

    for name in ("float32", "wide"):
        assert run(name) == [name, "True"]
    assert run("float32", "wide") == ["float32", "True", "wide", "True"]
    assert run("wide", "float32") == ["wide", "True", "float32", "True"]
