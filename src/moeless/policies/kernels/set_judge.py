"""What replica sets are worth: the penalty of a set, and a quick estimate for one near another.

The value of a set is measured, not guessed: recent loads are split over it as the token path
would, and what the slowest device needs beyond the lower bound is the penalty. Where touching an
expert has a price, that split tries several starts; for a set that differs by a replica or two
from one whose splits are known, it is enough to begin with those.

Loops compiled by numba at import (and cached on disk); they release the GIL. This module must not
know which sets are compared.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled
from moeless.policies.kernels.fixed_charge import GOOD_ENOUGH, min_time_split
from moeless.policies.kernels.relief import device_time, entry_price, improve_split, move_tokens
from moeless.policies.kernels.seats import fill_seats
from moeless.policies.kernels.token_flow import order_by_count
from moeless.policies.kernels.uneven import time_bound

TAIL_WEIGHT = 2.0
"""The penalty of a step with excess x is ``x + tail * x * x``: bad steps count more."""


@compiled(
    "float64(int64[:, ::1], uint8[:, ::1], float64[:, ::1], int64[:, :, ::1], float64[::1],"
    " float64[::1], float64, float64, float64[::1])"
)
def split_loads(
    load_NE, replicas_ED, price_XD, tokens_XED, excess_N, bound_N, tail, stop, weight_N
):
    """Split loads over a set as the token path would.

    Args:
        load_NE: Loads, int64 [N, E].
        replicas_ED: The set, uint8 [E, D].
        price_XD: What each device takes, see ``core.layer_cost.LayerCost.price_XD``.
        tokens_XED: Result, the splits, int64 [N, E, D]; where it has room for one only, each
            load overwrites the one before.
        excess_N: Result, time of the slowest device beyond the lower bound, relative to it.
        bound_N: Result, the lower bound of each, in tokens; 0 for a load of nothing.
        tail: Weight of the squared excess; 0 for the mean excess.
        stop: Give up once the penalty exceeds this.
        weight_N: Weight of each load, float64 [N], summing to 1.

    Returns:
        The penalty, or something above ``stop``; infinite where an expert with tokens has no
        replica.
    """
    experts, devices = replicas_ED.shape
    seat_ED = np.empty((experts, devices), np.int32)
    seats_E = np.empty(experts, np.int32)
    guest_DE = np.empty((devices, experts), np.int32)
    guests_D = np.empty(devices, np.int32)
    load_D = np.empty(devices, np.int64)
    order_E = np.arange(experts)
    penalty = 0.0
    for n in range(len(load_NE)):
        count_E = load_NE[n]
        tokens_ED = tokens_XED[min(n, len(tokens_XED) - 1)]
        bound = time_bound(count_E, price_XD)
        bound_N[n] = bound
        excess_N[n] = 0.0
        if bound == 0.0:
            tokens_ED[:] = 0
            continue
        if fill_seats(count_E, replicas_ED, seat_ED, seats_E, guest_DE, guests_D) >= 0:
            return np.inf
        order_by_count(count_E, order_E)
        slowest_s = min_time_split(
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
        excess = slowest_s / bound - 1.0
        excess_N[n] = excess
        penalty += weight_N[n] * (excess + tail * excess * excess)
        if penalty > stop:
            return penalty
    return penalty


@compiled("float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64[:, ::1], float64, float64)")
def set_penalty(load_NE, weight_N, replicas_ED, price_XD, tail, stop):
    """Mean penalty of a replica set over loads; see ``split_loads``."""
    experts, devices = replicas_ED.shape
    tokens_XED = np.empty((1, experts, devices), np.int64)
    excess_N = np.empty(len(load_NE))
    bound_N = np.empty(len(load_NE))
    return split_loads(
        load_NE, replicas_ED, price_XD, tokens_XED, excess_N, bound_N, tail, stop, weight_N
    )


@compiled(
    "int64(int64, int64, int32[:, ::1], int32[::1], int64[:, ::1], int64[::1], int64[::1],"
    " float64[:, ::1])"
)
def _pass_on(expert, source, seat_ED, seats_E, tokens_ED, load_D, touched_D, price_XD):
    """Give what a replica carried to the replica of the expert that is soonest done with it.

    Returns:
        0, or -1 where the expert has no other one.
    """
    held = tokens_ED[expert, source]
    target = np.int64(-1)
    best = np.inf
    for j in range(seats_E[expert]):
        d = seat_ED[expert, j]
        t = device_time(d, touched_D, load_D, price_XD)
        if tokens_ED[expert, d] == 0:
            t += entry_price(d, touched_D, price_XD)
        if t < best:
            best, target = t, np.int64(d)
    if target < 0:
        return -1
    move_tokens(expert, source, target, held, tokens_ED, load_D, touched_D)
    return 0


@compiled(
    "float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64[:, ::1], int64[:, :, ::1],"
    " float64[::1], float64[::1], int64[:, ::1], int64, float64, float64, float64)"
)
def penalty_near(
    load_NE,
    weight_N,
    replicas_ED,
    price_XD,
    known_NED,
    excess_N,
    bound_N,
    gone,
    few,
    few_stop,
    tail,
    stop,
):
    """About the penalty of a set near one whose splits are known; never below its least one.

    Args:
        load_NE: Loads, int64 [N, E].
        weight_N: Their weights.
        replicas_ED: The set, uint8 [E, D].
        price_XD: What each device takes, see ``core.layer_cost``; for an expert more than 0.
        known_NED: Splits over the other set, int64 [N, E, D].
        excess_N: Their excess.
        bound_N: Lower bounds.
        gone: Replicas of the other set that this one lacks, expert and device in the first
            two columns, or -1 there, int64 [2, 4].
        few: Loads after which the penalty must not exceed ``few_stop``.
        few_stop: See there.
        tail: Weight of the squared excess.
        stop: Give up once the penalty exceeds this.

    Returns:
        The estimate, or infinity where it was given up or an expert has no replica.
    """
    experts, devices = replicas_ED.shape
    seat_ED = np.empty((experts, devices), np.int32)
    seats_E = np.empty(experts, np.int32)
    guest_DE = np.empty((devices, experts), np.int32)
    guests_D = np.empty(devices, np.int32)
    tokens_ED = np.empty((experts, devices), np.int64)
    load_D = np.empty(devices, np.int64)
    touched_D = np.empty(devices, np.int64)
    penalty = 0.0
    for n in range(len(load_NE)):
        if bound_N[n] == 0.0:
            continue
        moved = False
        for i in range(len(gone)):
            if gone[i, 0] >= 0 and known_NED[n, gone[i, 0], gone[i, 1]] > 0:
                moved = True
        excess = excess_N[n]
        if moved or excess > GOOD_ENOUGH - 1.0:
            if fill_seats(load_NE[n], replicas_ED, seat_ED, seats_E, guest_DE, guests_D) >= 0:
                return np.inf
            load_D[:] = 0
            touched_D[:] = 0
            for e in range(experts):
                for d in range(devices):
                    held = known_NED[n, e, d]
                    tokens_ED[e, d] = held
                    if held > 0:
                        load_D[d] += held
                        touched_D[d] += 1
            for i in range(len(gone)):
                e, d = gone[i, 0], gone[i, 1]
                if e < 0 or tokens_ED[e, d] == 0:
                    continue
                if _pass_on(e, d, seat_ED, seats_E, tokens_ED, load_D, touched_D, price_XD) < 0:
                    return np.inf
            slowest_s = improve_split(
                seat_ED,
                seats_E,
                guest_DE,
                guests_D,
                tokens_ED,
                load_D,
                touched_D,
                price_XD,
                bound_N[n] * GOOD_ENOUGH,
            )
            excess = slowest_s / bound_N[n] - 1.0
        penalty += weight_N[n] * (excess + tail * excess * excess)
        if penalty > stop or (n + 1 == few and penalty > few_stop):
            return np.inf
    return penalty
