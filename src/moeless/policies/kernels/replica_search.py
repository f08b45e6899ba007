"""Finds the change of a replica set that balances recent loads best, off the token path.

The value of a set is measured, not guessed: recent loads are split over it as the token path
would, and what the slowest device needs beyond the lower bound is the penalty. A single change
adds a replica, or moves one (drops one and adds another). Candidates are led by the split's own
bottlenecks: where touching an expert is free and the fullest device u cannot be relieved, the
devices that a search from u reaches form an island that holds too much, and only a link from the
island to a device outside helps; where touching has a price, links that start at u or one hop
away are tried. Drops are taken from the replicas that carried least.

Loops compiled by numba at import (and cached on disk); they release the GIL. This module must not
know what a replica costs to load; ``moeless`` sets the price.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled
from moeless.policies.kernels.fixed_charge import min_time_split, time_bound
from moeless.policies.kernels.seats import fill_seats
from moeless.policies.kernels.token_flow import min_max_split, order_by_count

TAIL_WEIGHT = 2.0
"""The penalty of a step with excess x is ``x + tail * x * x``: bad steps count more."""


@compiled("float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64, float64, float64)")
def set_penalty(load_NE, weight_N, replicas_ED, touch, tail, stop):
    """Mean penalty of a replica set over loads.

    Args:
        load_NE: Loads, int64 [N, E].
        weight_N: Weight of each, float64 [N], summing to 1.
        replicas_ED: The set, uint8 [E, D].
        touch: Price of touching an expert on a device, in tokens.
        tail: Weight of the squared excess; 0 for the mean excess.
        stop: Give up once the penalty exceeds this.

    Returns:
        The penalty, or something above ``stop``; infinite where an expert with tokens has no
        replica.
    """
    experts, devices = replicas_ED.shape
    seat_ED = np.empty((experts, devices), np.int32)
    seats_E = np.empty(experts, np.int32)
    guest_DE = np.empty((devices, experts), np.int32)
    guests_D = np.empty(devices, np.int32)
    tokens_ED = np.empty((experts, devices), np.int64)
    load_D = np.empty(devices, np.int64)
    order_E = np.arange(experts)
    penalty = 0.0
    for n in range(len(load_NE)):
        count_E = load_NE[n]
        bound = time_bound(count_E, devices, touch, 1.0)
        if bound == 0.0:
            continue
        if fill_seats(count_E, replicas_ED, seat_ED, seats_E, guest_DE, guests_D) >= 0:
            return np.inf
        order_by_count(count_E, order_E)
        if touch == 0.0:
            fullest = min_max_split(
                count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D
            )
            excess = load_D[fullest] / bound - 1.0
        else:
            slowest_s = min_time_split(
                count_E,
                order_E,
                seat_ED,
                seats_E,
                guest_DE,
                guests_D,
                tokens_ED,
                load_D,
                touch,
                1.0,
            )
            excess = slowest_s / bound - 1.0
        penalty += weight_N[n] * (excess + tail * excess * excess)
        if penalty > stop:
            return penalty
    return penalty


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
    "void(int64[:, ::1], float64[::1], uint8[:, ::1], float64, float64[:, ::1], float64[:, ::1])"
)
def _survey(load_NE, weight_N, replicas_ED, touch, usage_ED, relief_ED):
    """What each replica carried, and what each missing link could have carried.

    Args:
        load_NE: Loads, int64 [N, E].
        weight_N: Their weights.
        replicas_ED: The set, uint8 [E, D]; every expert with tokens has a replica.
        touch: Price of touching an expert on a device, in tokens.
        usage_ED: Result: share of the bound that each replica carried, float64 [E, D].
        relief_ED: Result: what a replica here could have taken off the slowest device.
    """
    experts, devices = replicas_ED.shape
    seat_ED = np.empty((experts, devices), np.int32)
    seats_E = np.empty(experts, np.int32)
    guest_DE = np.empty((devices, experts), np.int32)
    guests_D = np.empty(devices, np.int32)
    tokens_ED = np.empty((experts, devices), np.int64)
    load_D = np.empty(devices, np.int64)
    order_E = np.arange(experts)
    island_D = np.empty(devices, np.bool_)
    time_D = np.empty(devices)
    usage_ED[:] = 0.0
    relief_ED[:] = 0.0
    max_hops = devices if touch == 0.0 else 1
    for n in range(len(load_NE)):
        count_E = load_NE[n]
        bound = time_bound(count_E, devices, touch, 1.0)
        if bound == 0.0:
            continue
        fill_seats(count_E, replicas_ED, seat_ED, seats_E, guest_DE, guests_D)
        order_by_count(count_E, order_E)
        if touch == 0.0:
            min_max_split(
                count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D
            )
        else:
            min_time_split(
                count_E,
                order_E,
                seat_ED,
                seats_E,
                guest_DE,
                guests_D,
                tokens_ED,
                load_D,
                touch,
                1.0,
            )
        scale = weight_N[n] / bound
        time_D[:] = 0.0
        for e in range(experts):
            for j in range(seats_E[e]):
                d = seat_ED[e, j]
                if tokens_ED[e, d] > 0:
                    time_D[d] += touch + tokens_ED[e, d]
                    usage_ED[e, d] += scale * (touch + tokens_ED[e, d])
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
                room = most - time_D[d] - touch
                if replicas_ED[e, d] == 0 and room > 1.0 and (touch > 0.0 or not island_D[d]):
                    relief_ED[e, d] += urgency * min(touch + held, room)


@compiled("int64(uint8[:, ::1], float64[:, ::1], int64[::1])")
def _least_used(replicas_ED, usage_ED, place_N):
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


@compiled("float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64, int64, float64, float64)")
def _trial(load_NE, weight_N, replicas_ED, touch, few, few_penalty, stop):
    """Penalty of a candidate, or infinity as soon as it is clear that it is no better."""
    if few > 0:
        first = set_penalty(
            load_NE[:few], weight_N[:few], replicas_ED, touch, TAIL_WEIGHT, few_penalty
        )
        if first >= few_penalty:
            return np.inf
    return set_penalty(load_NE, weight_N, replicas_ED, touch, TAIL_WEIGHT, stop)


@compiled(
    "float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64, float64, int64[::1], int64,"
    " int64, int64, int64, int64[:, ::1])"
)
def best_change(
    load_NE,
    weight_N,
    replicas_ED,
    touch,
    price,
    capacity_D,
    max_replicas,
    max_adds,
    max_drops,
    max_exchanges,
    change,
):
    """Find the change that lowers the penalty most, after the price of its loads.

    A change adds a replica, moves one, or lets two experts exchange devices.

    Args:
        load_NE: Loads, int64 [N, E], in an order whose first quarter stands for the rest.
        weight_N: Their weights, float64 [N], summing to 1.
        replicas_ED: The set, uint8 [E, D]; unchanged on return.
        touch: Price of touching an expert on a device, in tokens.
        price: Fall of the penalty that one load must at least bring.
        capacity_D: Replicas that each device may hold, int64 [D].
        max_replicas: Replicas in all; below it a replica is added and none dropped.
        max_adds: Links to try, the most promising first.
        max_drops: Replicas to try to drop for each, the least used first.
        max_exchanges: Exchanges to try, about the most promising links.
        change: Result, int64 [2, 4]: expert and device to drop, expert and device to add; -1 for
            none. The second row is that of an exchange.

    Returns:
        By how much the penalty falls beyond the price; 0 where nothing pays.
    """
    experts, devices = replicas_ED.shape
    change[:] = -1
    base = set_penalty(load_NE, weight_N, replicas_ED, touch, TAIL_WEIGHT, np.inf)
    if base <= price:
        return 0.0
    # Where judging takes long, a candidate must first do better on a few of the loads.
    few = len(load_NE) // 4 if touch > 0.0 and len(load_NE) >= 16 else 0
    few_penalty = set_penalty(
        load_NE[:few], weight_N[:few], replicas_ED, touch, TAIL_WEIGHT, np.inf
    )
    usage_ED = np.empty((experts, devices))
    relief_ED = np.empty((experts, devices))
    _survey(load_NE, weight_N, replicas_ED, touch, usage_ED, relief_ED)
    copies_E = np.zeros(experts, np.int64)
    held_D = np.zeros(devices, np.int64)
    for e in range(experts):
        for d in range(devices):
            if replicas_ED[e, d] != 0:
                copies_E[e] += 1
                held_D[d] += 1
    drops = np.empty(experts * devices, np.int64)
    total = _least_used(replicas_ED, usage_ED, drops)
    adds = np.argsort((-relief_ED).ravel(), kind="mergesort")
    best = base  # penalty and price of the best change so far
    exchanges = 0
    for i in range(min(max_adds, len(adds))):
        e1, d1 = adds[i] // devices, adds[i] % devices
        if relief_ED[e1, d1] <= 0.0:
            break
        replicas_ED[e1, d1] = 1
        if total < max_replicas and held_D[d1] < capacity_D[d1]:
            cost = price + _trial(
                load_NE, weight_N, replicas_ED, touch, few, few_penalty, best - price
            )
            if cost < best:
                best = cost
                change[:] = -1
                change[0, 2], change[0, 3] = e1, d1
        else:
            tried = 0
            for j in range(total):
                e0, d0 = drops[j] // devices, drops[j] % devices
                if copies_E[e0] == 1 and e0 != e1:
                    continue
                if d0 != d1 and held_D[d1] >= capacity_D[d1]:
                    continue
                replicas_ED[e0, d0] = 0
                cost = price + _trial(
                    load_NE, weight_N, replicas_ED, touch, few, few_penalty, best - price
                )
                replicas_ED[e0, d0] = 1
                if cost < best:
                    best = cost
                    change[:] = -1
                    change[0, 0], change[0, 1], change[0, 2], change[0, 3] = e0, d0, e1, d1
                tried += 1
                if tried >= max_drops:
                    break
        # The expert comes from another of its devices, and one of this device goes there.
        for d0 in range(devices):
            if exchanges >= max_exchanges or d0 == d1 or replicas_ED[e1, d0] == 0:
                continue
            for e0 in range(experts):
                if e0 == e1 or replicas_ED[e0, d1] == 0 or replicas_ED[e0, d0] != 0:
                    continue
                exchanges += 1
                replicas_ED[e1, d0] = 0
                replicas_ED[e0, d1] = 0
                replicas_ED[e0, d0] = 1
                cost = 2.0 * price + _trial(
                    load_NE, weight_N, replicas_ED, touch, few, few_penalty, best - 2.0 * price
                )
                replicas_ED[e1, d0] = 1
                replicas_ED[e0, d1] = 1
                replicas_ED[e0, d0] = 0
                if cost < best:
                    best = cost
                    change[0, 0], change[0, 1], change[0, 2], change[0, 3] = e1, d0, e1, d1
                    change[1, 0], change[1, 1], change[1, 2], change[1, 3] = e0, d1, e0, d0
        replicas_ED[e1, d1] = 0
    return base - best


@compiled("float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64, float64, int64[::1])")
def cheapest_drop(load_NE, weight_N, replicas_ED, touch, limit, drop):
    """Find the replica that is missed least.

    Args:
        load_NE: Loads, int64 [N, E].
        weight_N: Their weights, float64 [N], summing to 1.
        replicas_ED: The set, uint8 [E, D]; unchanged on return.
        touch: Price of touching an expert on a device, in tokens.
        limit: Mean excess that the set may have without the replica.
        drop: Result: (expert, device), -1 where no drop stays within the limit.

    Returns:
        Mean excess without it, or ``limit``.
    """
    experts, devices = replicas_ED.shape
    usage_ED = np.empty((experts, devices))
    relief_ED = np.empty((experts, devices))
    _survey(load_NE, weight_N, replicas_ED, touch, usage_ED, relief_ED)
    drop[:] = -1
    best = limit
    order = np.argsort(usage_ED.ravel(), kind="mergesort")
    tried = 0
    for i in range(len(order)):
        e, d = order[i] // devices, order[i] % devices
        if replicas_ED[e, d] == 0 or replicas_ED[e].sum() < 2:
            continue
        replicas_ED[e, d] = 0
        excess = set_penalty(load_NE, weight_N, replicas_ED, touch, 0.0, best)
        replicas_ED[e, d] = 1
        if excess < best:
            best = excess
            drop[0], drop[1] = e, d
        tried += 1
        if tried >= 8:
            break
    return best
