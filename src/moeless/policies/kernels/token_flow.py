"""Divides tokens so that the fullest device has as few as possible: a min-max flow.

Water-filling, expert by expert, comes close; augmenting paths, many at a time and each a shortest
one (after Dinic's algorithm), then make it exact. The result is the optimum of the linear program,
rounded up: where devices above a level reach none below it, the tokens on all that they reach
have nowhere else to go, so no split can have a lower level than the mean of those devices.

Loops over integers, compiled by numba at import (and cached on disk), so results are the same on
every machine. This module must not know about time; see ``fixed_charge`` for splits in which
touching one more expert has a price.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled


@compiled("void(int64[::1], int64[::1])")
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


@compiled("void(int64, int64, int32[:, ::1], int64, int64[:, ::1], int64[::1])")
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


@compiled(
    "int64(int64[::1], int64[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[::1], int32[::1], int32[::1])"
)
def rank_devices(room_D, tokens_ED, seat_ED, seats_E, guest_DE, guests_D, load_D, rank_D, queue):
    """Rank devices by their distance from those that have more tokens than room for them.

    Returns:
        How many devices were reached; negative where one of them has room left.
    """
    devices = len(load_D)
    tail = 0
    for d in range(devices):
        rank_D[d] = -1
        if load_D[d] > room_D[d]:
            rank_D[d] = 0
            queue[tail] = d
            tail += 1
    head = 0
    found = False
    while head < tail:
        a = queue[head]
        head += 1
        for i in range(guests_D[a]):
            e = guest_DE[a, i]
            if tokens_ED[e, a] == 0:
                continue
            for j in range(seats_E[e]):
                b = seat_ED[e, j]
                if rank_D[b] < 0:
                    rank_D[b] = rank_D[a] + 1
                    queue[tail] = b
                    tail += 1
                    if load_D[b] < room_D[b]:
                        found = True
    return -tail if found else tail


@compiled(
    "void(int64[::1], int64[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[::1], int32[::1], int32[:, ::1])"
)
def push_tokens(
    room_D, tokens_ED, seat_ED, seats_E, guest_DE, guests_D, load_D, rank_D, scratch_XD
):
    """Push tokens from overfull devices to those with room, along rising ranks only."""
    devices = len(load_D)
    guest, seat = scratch_XD[0], scratch_XD[1]  # where each device's search for a hop stands
    path_D, path_E = scratch_XD[2], scratch_XD[3]
    guest[:] = 0
    seat[:] = 0
    for source in range(devices):
        if rank_D[source] != 0:
            continue
        path_D[0] = source
        depth = 0
        while load_D[source] > room_D[source]:
            a = path_D[depth]
            if load_D[a] < room_D[a]:
                amount = min(load_D[source] - room_D[source], room_D[a] - load_D[a])
                for k in range(depth):
                    amount = min(amount, tokens_ED[path_E[k], path_D[k]])
                for k in range(depth):
                    tokens_ED[path_E[k], path_D[k]] -= amount
                    tokens_ED[path_E[k], path_D[k + 1]] += amount
                load_D[source] -= amount
                load_D[a] += amount
                depth = 0
                continue
            moved = False
            while guest[a] < guests_D[a]:
                e = guest_DE[a, guest[a]]
                if tokens_ED[e, a] > 0:
                    while seat[a] < seats_E[e]:
                        b = seat_ED[e, seat[a]]
                        if rank_D[b] == rank_D[a] + 1:
                            moved = True
                            path_E[depth] = e
                            depth += 1
                            path_D[depth] = b
                            break
                        seat[a] += 1
                if moved:
                    break
                guest[a] += 1
                seat[a] = 0
            if not moved:
                rank_D[a] = -1  # nothing leads on from here
                if depth == 0:
                    break
                depth -= 1


@compiled("int64(int64[:, ::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[::1])")
def _level(tokens_ED, seat_ED, seats_E, guest_DE, guests_D, load_D):
    """Push tokens along shortest augmenting paths until the fullest device is as low as can be.

    The level begins at the mean. Where devices above it reach none below, what they reach is an
    island whose tokens have nowhere else to go: its mean is the next level.

    Returns:
        The fullest device.
    """
    devices = len(load_D)
    rank_D = np.empty(devices, np.int32)
    queue = np.empty(devices, np.int32)
    scratch_XD = np.empty((4, devices), np.int32)
    total = np.int64(0)
    for d in range(devices):
        total += load_D[d]
    room_D = np.full(devices, (total + devices - 1) // devices)
    while True:
        reached = rank_devices(
            room_D, tokens_ED, seat_ED, seats_E, guest_DE, guests_D, load_D, rank_D, queue
        )
        if reached == 0:
            break
        if reached < 0:
            push_tokens(
                room_D,
                tokens_ED,
                seat_ED,
                seats_E,
                guest_DE,
                guests_D,
                load_D,
                rank_D,
                scratch_XD,
            )
            continue
        total = np.int64(0)
        for i in range(reached):
            total += load_D[queue[i]]
        room_D[:] = (total + reached - 1) // reached
    fullest = 0
    for d in range(1, devices):
        if load_D[d] > load_D[fullest]:
            fullest = d
    return np.int64(fullest)


@compiled(
    "int64(int64[::1], int64[::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[:, ::1], int64[::1])"
)
def min_max_split(count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D):
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
