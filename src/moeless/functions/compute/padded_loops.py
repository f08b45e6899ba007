"""The compiled loops around padded products of small bfloat16 experts.

Bits of bfloat16 are handled as uint16. Rounding is that of torch: after each operation, to even.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.policies.kernels.compiled import compiled

_Bits = NDArray[np.uint16]
_Ints = NDArray[np.int64]


@compiled("void(uint16[:,::1], uint16[:,::1])")
def silu_times_up(gate_up: _Bits, out: _Bits) -> None:
    """SiLU of each row's first half, times its second half.

    Args:
        gate_up: [n, 2I].
        out: Receives [n, I].
    """
    rows, inner = out.shape
    gate_bits, up_bits = np.empty(inner, np.uint32), np.empty(inner, np.uint32)
    gate, up = gate_bits.view(np.float32), up_bits.view(np.float32)
    exp_bits = np.empty(inner, np.int32)
    exp = exp_bits.view(np.float32)
    half, one, sixteen = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    for row in range(rows):
        for i in range(inner):
            gate_bits[i] = np.uint32(gate_up[row, i]) << sixteen
            up_bits[i] = np.uint32(gate_up[row, inner + i]) << sixteen
        for i in range(inner):
            # exp(-x) as 2^k times 2^f with f from -1/2 to 1/2: a polynomial, so that the compiler
            # can use vector instructions. Its error is below 2^-22; 2^128 is infinity.
            power = -gate[i] * np.float32(1.4426950408889634)
            power = min(max(power, np.float32(-126.0)), np.float32(128.0))
            whole = np.float32(np.floor(power + np.float32(0.5)))
            f = power - whole
            p = np.float32(1.5353362e-4)
            p = p * f + np.float32(1.3398874e-3)
            p = p * f + np.float32(9.6184370e-3)
            p = p * f + np.float32(5.5503324e-2)
            p = p * f + np.float32(2.4022648e-1)
            p = p * f + np.float32(6.9314720e-1)
            p = p * f + np.float32(1.0)
            exp[i] = p
            exp_bits[i] += np.int32(whole) << np.int32(23)
        for i in range(inner):
            gate[i] = gate[i] / (np.float32(1.0) + exp[i])
        for i in range(inner):
            bits = gate_bits[i]
            gate_bits[i] = (bits + half + ((bits >> sixteen) & one)) & np.uint32(0xFFFF0000)
        for i in range(inner):
            gate[i] = gate[i] * up[i]
        for i in range(inner):
            bits = gate_bits[i]
            out[row, i] = np.uint16((bits + half + ((bits >> sixteen) & one)) >> sixteen)


@compiled("void(uint16[:,::1], int64[::1], int64[:,::1], int64[::1], uint16[:,::1])")
def take_rows(source: _Bits, token_S: _Ints, range_n2: _Ints, first_n: _Ints, out: _Bits) -> None:
    """Copy the input rows of some assignments to runs of rows.

    Args:
        source: Input rows.
        token_S: The input row of each assignment.
        range_n2: The assignments of each run, from and to.
        first_n: The first row of each run.
        out: Receives them; rows of no run are untouched.
    """
    width = source.shape[1]
    for n in range(len(first_n)):
        start, first = range_n2[n, 0], first_n[n]
        for row in range(range_n2[n, 1] - start):
            token, place = token_S[start + row], first + row
            for i in range(width):
                out[place, i] = source[token, i]


@compiled("void(uint16[:,::1], int64[::1], int64[:,::1], uint16[:,::1])")
def place_rows(source: _Bits, first_n: _Ints, range_n2: _Ints, out: _Bits) -> None:
    """Copy runs of rows to their ranges.

    Args:
        source: Rows.
        first_n: The first row of each run.
        range_n2: Where each run goes, from and to.
        out: Receives them; rows of no range are untouched.
    """
    width = source.shape[1]
    for n in range(len(first_n)):
        start, first = range_n2[n, 0], first_n[n]
        for row in range(range_n2[n, 1] - start):
            place, origin = start + row, first + row
            for i in range(width):
                out[place, i] = source[origin, i]
