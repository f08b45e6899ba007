"""Norms and decode attention: right, and no row depends on another."""

import numpy as np
import pytest
import torch

from moeless.functions.compute.rows import DecodeAttention, rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype):
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 33), (2, 5, 576), (4, 1, 3, 16)], ids=str)
def test_a_norm_is_that_of_the_formula(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wanted = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    wanted = wanted * weight.double()
    y = rms_norm(x, weight.float().numpy(), 1e-5)
    torch.testing.assert_close(y.double(), wanted, **tolerance(dtype))
    alone = rms_norm(x.view(-1, shape[-1])[:1], weight.float().numpy(), 1e-5)
    assert torch.equal(alone[0], y.view(-1, shape[-1])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_finite_numbers_has_none_afterwards_and_spoils_no_other(dtype):
    x = torch.randn(3, 40).to(dtype)
    weight = np.ones(40, dtype=np.float32)
    before = rms_norm(x, weight, 1e-6)
    x[1, 7] = float("nan")
    y = rms_norm(x, weight, 1e-6)
    assert torch.isnan(y[1]).all()
    assert torch.equal(y[[0, 2]], before[[0, 2]])


def attend(query, keys, values, begin, end, sinks=None, scale=0.2):
    """The formula, in float64."""
    group = query.shape[1] // keys.shape[1]
    out = []
    for row in range(len(query)):
        seen = slice(begin[row], end[row])
        key = keys[row, :, seen].double().repeat_interleave(group, 0)
        value = values[row, :, seen].double().repeat_interleave(group, 0)
        scores = query[row].double() @ key.transpose(1, 2) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1)], dim=-1)
        shares = scores.softmax(-1)[..., : key.shape[1]]
        out.append((shares @ value)[:, 0])
    return torch.stack(out)[:, None]


SHAPES = {
    "one head": (1, 1, 8, 8),
    "groups": (9, 3, 64, 64),
    "values narrower than keys": (4, 4, 24, 12),
    "values wider than keys": (4, 2, 8, 40),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_the_formula_over_the_columns_that_are_seen(shape, with_sinks, dtype):
    heads, key_heads, depth, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(3)

    def draw(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    # Views of larger buffers, as a batch's cache hands out.
    keys = draw(7, key_heads, 90, depth)[2:6, :, 10:60]
    values = draw(7, key_heads, 90, width)[2:6, :, 10:60]
    query = draw(4, 1, heads, depth).transpose(1, 2)
    begin, end = np.array([0, 10, 49, 20]), np.array([50, 50, 50, 37])
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    attention = DecodeAttention()
    out = attention(query, keys, values, begin_B=begin, end_B=end, scale=0.2, sinks=sinks)
    wanted = attend(query, keys, values, begin, end, sinks)
    torch.testing.assert_close(out.double(), wanted, **tolerance(dtype))
    for row in range(4):
        alone = attention(
            query[row : row + 1],
            keys[row : row + 1, :, begin[row] : end[row]],
            values[row : row + 1, :, begin[row] : end[row]],
            begin_B=np.zeros(1, dtype=np.int64),
            end_B=end[row : row + 1] - begin[row],
            scale=0.2,
            sinks=sinks,
        )
        assert torch.equal(alone[0], out[row])


def test_scores_far_apart_do_not_overflow():
    query, keys = torch.full((1, 1, 1, 4), 100.0), torch.randn(1, 1, 20, 4) * 100
    values = torch.randn(1, 1, 20, 4)
    begin, end = np.zeros(1, dtype=np.int64), np.full(1, 20)
    out = DecodeAttention()(query, keys, values, begin_B=begin, end_B=end, scale=1.0)
    torch.testing.assert_close(
        out.double(), attend(query, keys, values, begin, end, scale=1.0), atol=1e-5, rtol=1e-5
    )
