"""Tiles of small bfloat16 experts: right at every height, and no row depends on another."""

import sys

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from moeless.core.model import ExpertShape
from moeless.functions.compute import bfloat16_products
from moeless.functions.compute.bfloat16_products import bits, loops_fit
from moeless.functions.compute.weight_stack import WeightStack

LOOPS = "moeless.functions.compute.bfloat16_loops"
SHAPE = ExpertShape(hidden=96, intermediate=48, dtype="bfloat16")

needs_tiles = pytest.mark.skipif(
    not bfloat16_products.can_multiply(), reason="this processor has no avx512_bf16"
)


def multiply(x, weights, sizes_n, *, slots=None, skip=0):
    """Rows of each expert times its weights; ``skip`` rows lie between two experts' results."""
    from moeless.functions.compute.bfloat16_loops import multiply_rows

    size_n = np.array(sizes_n)
    first_n = np.cumsum(size_n) - size_n
    place_n = first_n + skip * np.arange(len(size_n))
    slot_n = np.arange(len(size_n)) if slots is None else np.array(slots)
    out = torch.full((len(x) + skip * len(size_n), weights.shape[2]), 77.0).bfloat16()
    rows = np.arange(len(x))
    multiply_rows(bits(x), rows, first_n, size_n, slot_n, bits(weights), bits(out), place_n)
    taken = np.concatenate([p + np.arange(s) for p, s in zip(place_n, size_n, strict=True)])
    others = np.setdiff1d(np.arange(len(out)), taken)
    assert (out[others] == 77.0).all()
    return out[taken]


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_a_compiler_that_does_not_know_the_instruction_costs_speed_only(monkeypatch, error):
    class Finder:
        def find_spec(self, name, path, target=None):
            if name == LOOPS:
                raise error("no such type")

    monkeypatch.delitem(sys.modules, LOOPS, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx512bf16": True})
    bfloat16_products.can_multiply.cache_clear()
    try:
        assert not bfloat16_products.can_multiply()
        assert not loops_fit(SHAPE)
    finally:
        bfloat16_products.can_multiply.cache_clear()


@needs_tiles
@pytest.mark.parametrize(("depth", "width"), [(2, 32), (34, 96), (96, 80), (40, 33), (6, 63)])
@pytest.mark.parametrize("rows", range(1, 26))
def test_products_are_right_at_every_height_and_size(rows, depth, width):
    torch.manual_seed(rows)
    x, weights = torch.randn(rows, depth).bfloat16(), torch.randn(1, depth, width).bfloat16()
    got = multiply(x, weights, [rows])
    # Float32 sums, rounded to bfloat16 once.
    wanted = x.double() @ weights[0].double()
    torch.testing.assert_close(got.double(), wanted, atol=1e-5 * depth, rtol=2**-8)


@needs_tiles
def test_a_rows_result_is_the_same_whatever_is_computed_with_it():
    torch.manual_seed(0)
    x, weights = torch.randn(19, 64).bfloat16(), torch.randn(3, 64, 32).bfloat16()
    alone = torch.cat([multiply(x[i : i + 1], weights, [1], slots=[2]) for i in range(19)])
    for size in range(1, 20):
        sizes = [size, 19 - size] if size < 19 else [19]
        together = multiply(x, weights, sizes, slots=[2] * len(sizes))
        assert torch.equal(together, alone)


@needs_tiles
def test_experts_lie_in_any_slots_and_results_in_any_places():
    torch.manual_seed(0)
    x, weights = torch.randn(12, 64).bfloat16(), torch.randn(9, 64, 32).bfloat16()
    got = multiply(x, weights, [3, 0, 9], slots=[7, 1, 4], skip=2)
    wanted = torch.cat(
        [x[:3].double() @ weights[7].double(), x[3:].double() @ weights[4].double()]
    )
    torch.testing.assert_close(got.double(), wanted, atol=1e-3, rtol=2**-8)


@needs_tiles
def test_what_is_not_finite_stays_so():
    x, weights = torch.ones(1, 32).bfloat16(), torch.ones(1, 32, 32).bfloat16()
    x[0, 3] = float("inf")
    assert multiply(x, weights, [1]).isinf().all()
    x[0, 4] = float("nan")
    assert multiply(x, weights, [1]).isnan().all()


@needs_tiles
@pytest.mark.parametrize(
    "shape",
    [
        ExpertShape(hidden=96, intermediate=48, dtype="float32"),
        ExpertShape(hidden=96, intermediate=48, dtype="float16"),
        ExpertShape(hidden=96, intermediate=15, dtype="bfloat16"),
        ExpertShape(hidden=96, intermediate=14, dtype="bfloat16"),
        ExpertShape(hidden=30, intermediate=48, dtype="bfloat16"),
        ExpertShape(hidden=95, intermediate=48, dtype="bfloat16"),
        ExpertShape(hidden=96, intermediate=48, dtype="bfloat16", bias=True),
    ],
)
def test_other_dtypes_odd_or_tiny_sizes_and_biases_are_left_to_matrix_products(shape):
    assert loops_fit(SHAPE)
    assert loops_fit(ExpertShape(hidden=576, intermediate=40, dtype="bfloat16"))
    assert not loops_fit(shape)


def test_without_the_instruction_the_loops_are_not_even_compiled(monkeypatch):
    monkeypatch.setattr(bfloat16_products.llvm, "get_host_cpu_features", dict)
    monkeypatch.setitem(sys.modules, LOOPS, None)  # importing them would fail
    assert not bfloat16_products.can_multiply.__wrapped__()


@pytest.mark.parametrize(
    ("name", "value"), [("DISABLE_JIT", 1), ("CPU_NAME", "generic"), ("CPU_FEATURES", "+avx2")]
)
def test_a_compiler_that_was_told_of_another_processor_is_not_asked_for_the_loops(
    name, value, monkeypatch
):
    monkeypatch.setattr(bfloat16_products.numba.config, name, value)
    monkeypatch.setitem(sys.modules, LOOPS, None)
    assert not bfloat16_products.can_multiply.__wrapped__()


@needs_tiles
def test_loops_that_compute_something_else_are_not_used(monkeypatch):
    monkeypatch.setattr(f"{LOOPS}.multiply_rows", lambda *_: None)
    assert not bfloat16_products.can_multiply.__wrapped__()


def test_several_threads_share_large_products_and_no_small_ones(monkeypatch):
    stack = WeightStack(SHAPE, 4, input_major=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert bfloat16_products.bfloat16_loops_pay(stack, [1, 2])
    assert not bfloat16_products.bfloat16_loops_pay(stack, [100_000])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert bfloat16_products.bfloat16_loops_pay(stack, [100_000])


def test_weights_with_outputs_first_are_no_weights_for_tiles():
    assert not bfloat16_products.bfloat16_loops_pay(WeightStack(SHAPE, 4), [1])
