"""Numbers of rows are rounded up so that oneDNN keeps few products, whatever the batches."""

import psutil
import pytest
import torch

from moeless.functions.compute.kernels import packed_linear, plain_linear, unpacked_linear
from moeless.functions.compute.row_classes import pad_rows, round_up_rows


def test_rounding_wastes_at_most_an_eighth_and_leaves_few_numbers():
    rows = range(1, 2049)
    rounded = [round_up_rows(n) for n in rows]
    assert all(n <= r <= n * 9 / 8 for n, r in zip(rows, rounded, strict=True))
    assert rounded == sorted(rounded)
    assert len(set(rounded)) <= 72


@pytest.mark.parametrize("n", range(1, 17))
def test_few_rows_are_not_rounded(n):
    assert round_up_rows(n) == n


def test_rows_with_memory_behind_them_are_not_copied():
    block = torch.randn(64, 8)
    padded = pad_rows(block[10:43])
    assert padded.data_ptr() == block[10:].data_ptr()
    assert padded.shape == (36, 8)
    assert torch.equal(padded[:33], block[10:43])


@pytest.mark.parametrize("last", [64, 63])
def test_rows_at_the_end_of_their_memory_are_copied(last):
    block = torch.randn(64, 8)
    x = block[last - 33 : last]
    padded = pad_rows(x)
    assert padded.shape == (36, 8)
    assert torch.equal(padded[:33], x)
    assert padded.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("layout", [plain_linear, packed_linear, unpacked_linear])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_products_have_the_rows_that_were_asked_for(layout, bias, in_place):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    offset = torch.randn(96, generator=generator) if bias else None
    linear, _ = layout(weight, offset)
    block = torch.randn(600, 64, generator=generator)
    block[500:] = torch.nan  # what lies behind the rows must not matter
    for n in (1, 17, 33, 500):
        x = block[500 - n : 500]
        out = torch.empty(n, 96) if in_place else None
        y = linear(x, out)
        assert y.shape == (n, 96)
        expected = torch.nn.functional.linear(x, weight, offset)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_all_numbers_leave_little_memory_behind():
    linear, _ = plain_linear(torch.randn(104, 568), None)  # a shape that no other test has
    block, process = torch.randn(500, 568), psutil.Process()
    with torch.inference_mode():
        linear(block)
        before = process.memory_info().rss
        for n in range(20, 420):
            linear(block[:n])
        grown = process.memory_info().rss - before
    assert grown < 64 << 20  # it was more than 200 MB
