"""Decoders against those of transformers."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeless.functions.store.codecs import decode_fp8_block, decode_mxfp4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_equals_the_reference_for_every_code_and_scale(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    scales = torch.arange(2, 254, dtype=torch.uint8)
    blocks = codes.repeat(1, len(scales), 1)
    rows = scales.repeat(16, 1)
    expected = convert_moe_packed_tensors(blocks[None], rows[None], dtype=dtype)[0].t()
    assert torch.equal(decode_mxfp4(blocks, rows, dtype), expected)


def test_mxfp4_rounds_once_where_float16_holds_the_value_but_not_the_scale():
    blocks = torch.full((1, 1, 16), 0x11, dtype=torch.uint8)
    scales = torch.tensor([[127 + 16]], dtype=torch.uint8)
    assert decode_mxfp4(blocks, scales, torch.float16).tolist() == [[0.5 * 2**16] * 32]


def test_fp8_equals_the_reference_on_whole_blocks():
    generator = torch.manual_seed(0)
    weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        expected = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
        assert torch.equal(decode_fp8_block(weight, scale, (128, 128), dtype), expected)


@pytest.mark.parametrize("shape", [(130, 200), (1, 1), (128, 129), (257, 128)])
def test_fp8_blocks_at_the_edges_may_be_ragged(shape):
    generator = torch.manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    grid = [-(-size // 128) for size in shape]
    scale = torch.rand(grid, generator=generator)
    decoded = decode_fp8_block(weight, scale, (128, 128), torch.float32)
    for row in range(0, shape[0], 43):
        for column in range(0, shape[1], 43):
            factor = scale[row // 128, column // 128]
            assert decoded[row, column] == weight[row, column].float() * factor
