"""Which replicas may serve which experts, as index lists for compiled loops.

This module must not know how tokens are divided over them.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.policies.kernels.compiled import compiled

IndexArray = NDArray[np.int32]


class Seats:
    """Room for the index lists of one placement; reused from call to call.

    Args:
        num_experts: E.
        num_devices: D.
    """

    def __init__(self, num_experts: int, num_devices: int) -> None:
        self.seat_ED: IndexArray = np.zeros((num_experts, num_devices), dtype=np.int32)
        """Devices of each expert's replicas, the first ``seats_E`` of each row."""
        self.seats_E: IndexArray = np.zeros(num_experts, dtype=np.int32)
        self.guest_DE: IndexArray = np.zeros((num_devices, num_experts), dtype=np.int32)
        """Experts on each device with tokens that could go elsewhere, the first ``guests_D``."""
        self.guests_D: IndexArray = np.zeros(num_devices, dtype=np.int32)


@compiled("int64(int64[::1], uint8[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1])")
def fill_seats(count_E, replicas_ED, seat_ED, seats_E, guest_DE, guests_D):
    """List the seats of every expert that has tokens.

    Returns:
        -1, or the first expert that has tokens and no replica.
    """
    experts, devices = replicas_ED.shape
    stranded = -1
    for d in range(devices):
        guests_D[d] = 0
    for e in range(experts):
        n = 0
        if count_E[e] > 0:
            for d in range(devices):
                if replicas_ED[e, d] != 0:
                    seat_ED[e, n] = d
                    n += 1
            if n > 1:
                for j in range(n):
                    d = seat_ED[e, j]
                    guest_DE[d, guests_D[d]] = e
                    guests_D[d] += 1
            if n == 0 and stranded < 0:
                stranded = e
        seats_E[e] = n
    return stranded
