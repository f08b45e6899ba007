"""Divides tokens so that the slowest device finishes as early as possible on real hardware.

A device reads the weights of every expert that it touches, whatever the token count:
``time = touch x (experts touched) + token x (tokens)``. Splitting an expert therefore has a
fixed price, and small batches are best not split at all. That makes it a fixed-charge problem,
which is hard in general; here two very different starts, whole experts and the min-max flow of
``token_flow``, are improved by a local search that relieves the slowest device, and the better
end counts.

Loops compiled by numba at import (and cached on disk); the only floating point is sums and
comparisons of products, without reordering, so results are the same on every machine.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled
from moeless.policies.kernels.relief import improve_split
from moeless.policies.kernels.token_flow import min_max_split
from moeless.policies.kernels.uneven import seat_whole_experts, split_by_tokens, time_bound

_SMALL = 64
"""Experts x devices up to which more starts are tried."""

GOOD_ENOUGH = 1.001
"""Times the lower bound: what is as close as that is not improved further."""

_STOP_STARTING = 1.004
"""Times the lower bound: what is as close as that is not begun anew."""


@compiled(
    "void(int64[::1], int64[::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[:, ::1], int64[::1])"
)
def _seat_fewest(count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D):
    """Give each expert to one device, with as few on the fullest device as possible.

    Where touching is all that counts this is the optimum.
    """
    one_E = np.minimum(count_E, 1)
    min_max_split(one_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D)
    load_D[:] = 0
    for e in range(len(count_E)):
        for j in range(seats_E[e]):
            d = seat_ED[e, j]
            tokens_ED[e, d] *= count_E[e]
            load_D[d] += tokens_ED[e, d]


@compiled("void(int64[::1], int64, int64[::1])")
def _turn(order_E, turn, turned_E):
    """Begin the order elsewhere; after a whole turn take every second expert first, and so on."""
    experts = len(order_E)
    stride = 1 + (turn - 1) // experts
    n = 0
    for first in range(stride):
        for e in range(first, experts, stride):
            turned_E[n] = order_E[(e + turn) % experts]
            n += 1


@compiled(
    "float64(int64[::1], int64[::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[:, ::1], int64[::1], float64[:, ::1])"
)
def min_time_split(
    count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D, price_XD
):
    """Divide tokens over seats.

    Args:
        count_E: Tokens of each expert, int64 [E].
        order_E: The experts from most to fewest tokens, int64 [E].
        seat_ED: Devices of each expert's replicas (``seats.Seats``); reordered within rows.
        seats_E: How many of each row count; 0 for experts without tokens.
        guest_DE: Experts of each device that have other seats as well.
        guests_D: How many of each row count.
        tokens_ED: Result, tokens of each replica, int64 [E, D].
        load_D: Result, tokens of each device, int64 [D].
        price_XD: What each device takes, see ``core.layer_cost.LayerCost.price_XD``.

    Returns:
        Time of the slowest device, in tokens.
    """
    experts, devices = tokens_ED.shape
    if not price_XD[1].any():
        # Nothing but tokens counts: that has an exact solution.
        return split_by_tokens(
            count_E,
            order_E,
            seat_ED,
            seats_E,
            guest_DE,
            guests_D,
            tokens_ED,
            load_D,
            price_XD,
        )
    bound = time_bound(count_E, price_XD)
    best_s = np.inf
    trial_ED = np.empty_like(tokens_ED)
    trial_D = np.empty_like(load_D)
    touched_D = np.empty(devices, np.int64)
    turned_E = order_E.copy()
    # Large batches are best begun by levelling tokens, small ones by seating whole experts.
    by_tokens = bound > 16.0 * price_XD[1].max()
    # Where the problem is small, further orders cost little and find what the first ones miss.
    starts = 1 if by_tokens else 3
    if experts * devices <= _SMALL:
        starts = 3 + min(experts, 8)
    if experts * devices <= _SMALL // 2:
        starts += 3 * experts
    for start in range(starts):
        if start == (0 if by_tokens else 2):
            split_by_tokens(
                count_E,
                order_E,
                seat_ED,
                seats_E,
                guest_DE,
                guests_D,
                trial_ED,
                trial_D,
                price_XD,
            )
        elif start == 1:
            _seat_fewest(count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, trial_ED, trial_D)
        else:
            if start > 2:
                _turn(order_E, start - 2, turned_E)
            seat_whole_experts(count_E, turned_E, seat_ED, seats_E, trial_ED, trial_D, price_XD)
        trial_s = improve_split(
            seat_ED,
            seats_E,
            guest_DE,
            guests_D,
            trial_ED,
            trial_D,
            touched_D,
            price_XD,
            bound * GOOD_ENOUGH,
        )
        if trial_s < best_s:
            best_s = trial_s
            tokens_ED[:] = trial_ED
            load_D[:] = trial_D
            if best_s <= bound * (GOOD_ENOUGH if start == 0 else _STOP_STARTING):
                break
    return best_s
