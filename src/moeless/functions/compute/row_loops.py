"""The compiled loops of ``row_products``."""

import numpy as np
from numpy.typing import NDArray

from moeless.policies.kernels.compiled import compiled

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


@compiled(
    "void(float32[:,::1], int64[::1], int64[:,::1], int64[::1], float32[:,:,::1], float32[:,::1])",
    reorders_sums=True,
)
def gate_up_rows(
    x_TH: _Floats,
    token_S: _Ints,
    range_n2: _Ints,
    slot_n: _Ints,
    weight: _Floats,
    out: _Floats,
) -> None:
    """Gate and up projection of each expert's rows, one expert after the other.

    Args:
        x_TH: Input rows.
        token_S: Which input row each assignment reads.
        range_n2: The assignments of each expert, from and to.
        slot_n: Where each expert's weights are.
        weight: [slots, 2I, H].
        out: Receives [rows of all experts, 2I].
    """
    row = 0
    for n in range(len(slot_n)):
        expert = weight[slot_n[n]]
        for assignment in range(range_n2[n, 0], range_n2[n, 1]):
            x_H = x_TH[token_S[assignment]]
            for j in range(expert.shape[0]):
                total = np.float32(0.0)
                for k in range(expert.shape[1]):
                    total += x_H[k] * expert[j, k]
                out[row, j] = total
            row += 1


@compiled(
    "void(float32[:,::1], int64[:,::1], int64[::1], float32[:,:,::1], float32[:,::1])",
    reorders_sums=True,
)
def down_rows(
    inner: _Floats, range_n2: _Ints, slot_n: _Ints, weight: _Floats, y_SH: _Floats
) -> None:
    """Down projection of each expert's rows, each to the row of its assignment.

    Args:
        inner: [rows of all experts, I], one expert after the other.
        range_n2: The assignments of each expert, from and to.
        slot_n: Where each expert's weights are.
        weight: [slots, H, I].
        y_SH: Receives the outputs; rows of other assignments are untouched.
    """
    row = 0
    for n in range(len(slot_n)):
        expert = weight[slot_n[n]]
        for assignment in range(range_n2[n, 0], range_n2[n, 1]):
            for j in range(expert.shape[0]):
                total = np.float32(0.0)
                for k in range(expert.shape[1]):
                    total += inner[row, k] * expert[j, k]
                y_SH[assignment, j] = total
            row += 1
