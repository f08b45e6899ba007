"""What a replica set's splits tell: what each replica carried, and which link would have helped.

Where touching an expert is free and the fullest device u cannot be relieved, the devices that a
search from u reaches form an island that holds too much, and only a link from the island to a
device outside helps. Where touching has a price, links that start at u or one hop away count.

Loops compiled by numba at import (and cached on disk); they release the GIL. This module must not
know how sets are changed (``replica_search``).
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled
from moeless.policies.kernels.seats import fill_seats
from moeless.policies.kernels.set_judge import TAIL_WEIGHT


@compiled(
    "void(int64, int64[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64,"
    " boolean[::1])"
)
def _find_island(start, tokens_ED, seat_ED, seats_E, guest_DE, guests_D, max_hops, island_D):
    """Mark the devices to which tokens of the start could be passed on, hop by hop."""
    devices = len(island_D)
    queue = np.empty(devices, np.int32)
    hops = np.empty(devices, np.int64)
    island_D[:] = False
    island_D[start] = True
    queue[0] = start
    hops[0] = 0
    head, tail = 0, 1
    while head < tail:
        a = queue[head]
        depth = hops[head]
        head += 1
        if depth >= max_hops:
            continue
        for i in range(guests_D[a]):
            e = guest_DE[a, i]
            if tokens_ED[e, a] == 0:
                continue
            for j in range(seats_E[e]):
                b = seat_ED[e, j]
                if not island_D[b]:
                    island_D[b] = True
                    queue[tail] = b
                    hops[tail] = depth + 1
                    tail += 1


@compiled(
    "void(int64[:, ::1], float64[::1], uint8[:, ::1], float64[:, ::1], int64[:, :, ::1],"
    " float64[::1], float64[:, ::1], float64[:, ::1])"
)
def survey_set(load_NE, weight_N, replicas_ED, price_XD, known_NED, bound_N, usage_ED, relief_ED):
    """What each replica carried, and what each missing link could have carried.

    Args:
        load_NE: Loads, int64 [N, E].
        weight_N: Their weights.
        replicas_ED: The set, uint8 [E, D]; every expert with tokens has a replica.
        price_XD: What each device takes, see ``core.layer_cost.LayerCost.price_XD``.
        known_NED: Splits of the loads over the set, int64 [N, E, D].
        bound_N: Lower bound of each load, in tokens.
        usage_ED: Result: share of the bound that each replica carried, float64 [E, D].
        relief_ED: Result: what a replica here could have taken off the slowest device.
    """
    experts, devices = replicas_ED.shape
    seat_ED = np.empty((experts, devices), np.int32)
    seats_E = np.empty(experts, np.int32)
    guest_DE = np.empty((devices, experts), np.int32)
    guests_D = np.empty(devices, np.int32)
    island_D = np.empty(devices, np.bool_)
    time_D = np.empty(devices)
    usage_ED[:] = 0.0
    relief_ED[:] = 0.0
    touch_D, token_D = price_XD[1], price_XD[2]
    exact = not touch_D.any()
    max_hops = devices if exact else 1
    for n in range(len(load_NE)):
        bound = bound_N[n]
        if bound == 0.0:
            continue
        tokens_ED = known_NED[n]
        fill_seats(load_NE[n], replicas_ED, seat_ED, seats_E, guest_DE, guests_D)
        scale = weight_N[n] / bound
        time_D[:] = 0.0
        for e in range(experts):
            for j in range(seats_E[e]):
                d = seat_ED[e, j]
                if tokens_ED[e, d] > 0:
                    spent = touch_D[d] + token_D[d] * tokens_ED[e, d]
                    if time_D[d] == 0.0:
                        time_D[d] = price_XD[0, d]
                    time_D[d] += spent
                    usage_ED[e, d] += scale * spent
        slowest = np.argmax(time_D)
        most = time_D[slowest]
        excess = most / bound - 1.0
        if excess <= 0.0:
            continue
        _find_island(slowest, tokens_ED, seat_ED, seats_E, guest_DE, guests_D, max_hops, island_D)
        urgency = scale * (1.0 + 2.0 * TAIL_WEIGHT * excess)
        for e in range(experts):
            held = np.int64(0)
            for j in range(seats_E[e]):
                if island_D[seat_ED[e, j]]:
                    held += tokens_ED[e, seat_ED[e, j]]
            if held == 0:
                continue
            for d in range(devices):
                room = most - time_D[d] - touch_D[d]
                if time_D[d] == 0.0:
                    room -= price_XD[0, d]
                if replicas_ED[e, d] == 0 and room > token_D[d] and not (exact and island_D[d]):
                    relief_ED[e, d] += urgency * min(touch_D[d] + token_D[d] * held, room)


@compiled("int64(uint8[:, ::1], float64[:, ::1], int64[::1])")
def least_used(replicas_ED, usage_ED, place_N):
    """List the replicas, the least used first, as expert x D + device; returns how many."""
    experts, devices = replicas_ED.shape
    n = 0
    for e in range(experts):
        for d in range(devices):
            if replicas_ED[e, d] != 0:
                place_N[n] = e * devices + d
                n += 1
    flat = usage_ED.ravel()
    place_N[:n] = place_N[:n][np.argsort(flat[place_N[:n]], kind="mergesort")]
    return n
