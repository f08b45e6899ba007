"""Decoders of quantised weights. Pure: tensors in, tensors out."""

import math

import torch

MXFP4_GROUP = 32
"""Values that share one scale in MXFP4; they are packed into 16 bytes."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_SIGNED = _FP4 + tuple(-value for value in _FP4)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode OCP microscaling FP4: two E2M1 values per byte, one power of two per 32 values.

    Args:
        blocks: uint8 [R, G, 16]; the low half of a byte comes first.
        scales: uint8 [R, G], exponents with bias 127.
        dtype: Of the result.

    Returns:
        [R, G * 32] of ``dtype``; exact in float32 and bfloat16.
    """
    # In float16 the scale alone may overflow although the product does not.
    work = torch.float32 if dtype == torch.float16 else dtype
    low = torch.tensor(_FP4_SIGNED, dtype=work).repeat(16)
    high = torch.tensor(_FP4_SIGNED, dtype=work).repeat_interleave(16)
    pairs = torch.stack((low, high), dim=-1)
    values = pairs[blocks.to(torch.int32)].flatten(-2)
    ones = torch.ones(scales.shape, dtype=torch.float32)
    factor = torch.ldexp(ones, scales.to(torch.int32) - 127)
    values *= factor.to(work).unsqueeze(-1)
    return values.flatten(-2).to(dtype)


def decode_fp8_block(
    weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Decode FP8 with one scale per block of rows and columns.

    Args:
        weight: float8_e4m3fn [R, C].
        scale_inv: [ceil(R / rows), ceil(C / columns)]; blocks at the edges may be ragged.
        block: Rows and columns of one block.
        dtype: Of the result.

    Returns:
        [R, C] of ``dtype``; products are rounded once, from float32.
    """
    rows, columns = block
    result = torch.empty(weight.shape, dtype=dtype)
    factors = scale_inv.to(torch.float32).repeat_interleave(columns, dim=1)
    factors = factors[:, : weight.shape[1]]
    for index in range(math.ceil(weight.shape[0] / rows)):
        part = slice(index * rows, (index + 1) * rows)
        result[part] = weight[part].to(torch.float32) * factors[index]
    return result
