"""Divides tokens so that the fullest device has as few as possible: a min-max flow.

Water-filling, expert by expert, comes close; augmenting paths from the fullest device then make
it exact. The result is the optimum of the linear program, rounded up: when the search from the
fullest device u ends, every device that it reached holds at least max - 1 tokens, and the tokens
on those devices have nowhere else to go.

Loops over integers, compiled by numba at import (and cached on disk), so results are the same on
every machine. This module must not know about time; see ``fixed_charge`` for splits in which
touching one more expert has a price.
"""

import numpy as np
from numba import njit


@njit("void(int64[::1], int64[::1])", cache=True, nogil=True)
def order_by_count(count_E, order_E):
    """Sort ``order_E`` by falling count, ties by index; almost free when almost sorted."""
    for i in range(1, len(order_E)):
        e = order_E[i]
        j = i - 1
        while j >= 0 and (
            count_E[order_E[j]] < count_E[e]
            or (count_E[order_E[j]] == count_E[e] and order_E[j] > e)
        ):
            order_E[j + 1] = order_E[j]
            j -= 1
        order_E[j + 1] = e


@njit(
    "void(int64, int64, int32[:, ::1], int64, int64[:, ::1], int64[::1])", cache=True, nogil=True
)
def _pour(expert, count, seat_ED, seats, tokens_ED, load_D):
    """Fill an expert's tokens into its seats from the emptiest up."""
    seat = seat_ED[expert]
    for i in range(1, seats):
        d = seat[i]
        j = i - 1
        while j >= 0 and (
            load_D[seat[j]] > load_D[d] or (load_D[seat[j]] == load_D[d] and seat[j] > d)
        ):
            seat[j + 1] = seat[j]
            j -= 1
        seat[j + 1] = d
    used = 1
    total = load_D[seat[0]]
    while used < seats and load_D[seat[used]] * used - total < count:
        total += load_D[seat[used]]
        used += 1
    level = (total + count) // used
    rest = (total + count) - level * used
    for i in range(used):
        d = seat[i]
        share = level - load_D[d]
        if i < rest:
            share += 1
        tokens_ED[expert, d] = share
        load_D[d] += share


@njit(
    "int64(int64[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[::1])",
    cache=True,
    nogil=True,
)
def _level(tokens_ED, seat_ED, seats_E, guest_DE, guests_D, load_D):
    """Push tokens along augmenting paths until the fullest device cannot be relieved.

    Returns:
        The fullest device.
    """
    experts, devices = tokens_ED.shape
    from_device = np.empty(devices, np.int32)
    by_expert = np.empty(devices, np.int32)
    queue = np.empty(devices, np.int32)
    seen_E = np.zeros(experts, np.int64)
    seen_D = np.zeros(devices, np.int64)
    stamp = 0
    while True:
        fullest = 0
        for d in range(1, devices):
            if load_D[d] > load_D[fullest]:
                fullest = d
        stamp += 1
        queue[0] = fullest
        seen_D[fullest] = stamp
        head, tail, found = 0, 1, -1
        lowest = load_D[fullest] - 1
        while head < tail and found < 0:
            a = queue[head]
            head += 1
            for i in range(guests_D[a]):
                e = guest_DE[a, i]
                if tokens_ED[e, a] == 0 or seen_E[e] == stamp:
                    continue
                seen_E[e] = stamp
                for j in range(seats_E[e]):
                    b = seat_ED[e, j]
                    if seen_D[b] == stamp:
                        continue
                    seen_D[b] = stamp
                    from_device[b] = a
                    by_expert[b] = e
                    queue[tail] = b
                    tail += 1
                    if load_D[b] < lowest:
                        lowest = load_D[b]
                        found = b
        if found < 0:
            return fullest
        amount = (load_D[fullest] - load_D[found]) // 2
        b = found
        while b != fullest:
            amount = min(amount, tokens_ED[by_expert[b], from_device[b]])
            b = from_device[b]
        b = found
        while b != fullest:
            tokens_ED[by_expert[b], from_device[b]] -= amount
            tokens_ED[by_expert[b], b] += amount
            b = from_device[b]
        load_D[fullest] -= amount
        load_D[found] += amount


@njit(
    "int64(int64[::1], int64[::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[:, ::1], int64[::1])",
    cache=True,
    nogil=True,
)
def min_max_split(count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D):
    """Divide tokens over seats.

    Args:
        count_E: Tokens of each expert, int64 [E].
        order_E: The experts from most to fewest tokens, int64 [E].
        seat_ED: Devices of each expert's replicas (``seats.Seats``); reordered within rows.
        seats_E: How many of each row count; 0 for experts without tokens.
        guest_DE: Experts that each device may serve.
        guests_D: How many of each row count.
        tokens_ED: Result, tokens of each replica, int64 [E, D].
        load_D: Result, tokens of each device, int64 [D].

    Returns:
        The fullest device.
    """
    experts = len(count_E)
    tokens_ED[:] = 0
    load_D[:] = 0
    for e in range(experts):
        if seats_E[e] == 1:
            d = seat_ED[e, 0]
            tokens_ED[e, d] = count_E[e]
            load_D[d] += count_E[e]
    for i in range(experts):
        e = order_E[i]
        if seats_E[e] > 1:
            _pour(e, count_E[e], seat_ED, seats_E[e], tokens_ED, load_D)
    return _level(tokens_ED, seat_ED, seats_E, guest_DE, guests_D, load_D)
