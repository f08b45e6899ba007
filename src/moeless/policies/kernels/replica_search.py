"""Finds the change of a replica set that balances recent loads best, off the token path.

A set is judged by what the splitter makes of recent loads (``set_judge``). A single change adds a
replica, moves one (drops one and adds another), or lets two experts exchange devices. Candidates
are led by the split's own bottlenecks (``set_survey``): links that would have relieved the slowest
device are tried first, and drops are taken from the replicas that carried least.

Where touching has a price a split takes long, so candidates are first judged from the splits that
are known, and only the most promising ones as the token path would.

Loops compiled by numba at import (and cached on disk); they release the GIL. This module must not
know what a replica costs to load; ``moeless`` sets the price.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled
from moeless.policies.kernels.set_judge import (
    TAIL_WEIGHT,
    penalty_near,
    set_penalty,
    split_loads,
)
from moeless.policies.kernels.set_survey import least_used, survey_set

_SHORTLIST = 4
"""Candidates that are judged as the token path would where judging all of them takes too long."""


@compiled("void(uint8[:, ::1], int64[:, ::1], boolean)")
def _apply(replicas_ED, change, forth):
    """Make a change, or take it back."""
    for i in range(len(change)):
        if change[i, 0] >= 0:
            replicas_ED[change[i, 0], change[i, 1]] = 0 if forth else 1
    for i in range(len(change)):
        if change[i, 2] >= 0:
            replicas_ED[change[i, 2], change[i, 3]] = 1 if forth else 0


@compiled(
    "float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64[:, ::1], int64[:, :, ::1],"
    " float64[::1], float64[::1], int64[:, ::1], int64, float64, float64)"
)
def _trial(
    load_NE,
    weight_N,
    replicas_ED,
    price_XD,
    known_NED,
    excess_N,
    bound_N,
    change,
    few,
    few_stop,
    stop,
):
    """Penalty of the set after a change, about; the set is as it was on return.

    Returns:
        The penalty; infinity or more than ``stop`` where it is no better.
    """
    _apply(replicas_ED, change, True)
    if not price_XD[1].any():
        cost = set_penalty(load_NE, weight_N, replicas_ED, price_XD, TAIL_WEIGHT, stop)
    else:
        cost = penalty_near(
            load_NE,
            weight_N,
            replicas_ED,
            price_XD,
            known_NED,
            excess_N,
            bound_N,
            change,
            few,
            few_stop,
            TAIL_WEIGHT,
            stop,
        )
    _apply(replicas_ED, change, False)
    return cost


@compiled("void(float64, int64[:, ::1], float64[::1], int64[:, :, ::1])")
def _shortlist(cost, change, cost_X, change_XCM):
    """Put a candidate among the best so far, whose costs ascend."""
    i = len(cost_X) - 1
    while i > 0 and cost < cost_X[i - 1]:
        cost_X[i] = cost_X[i - 1]
        change_XCM[i] = change_XCM[i - 1]
        i -= 1
    cost_X[i] = cost
    change_XCM[i] = change


@compiled(
    "float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64[:, ::1], float64, int64[::1],"
    " int64, int64, int64, int64, int64[:, ::1])"
)
def best_change(
    load_NE,
    weight_N,
    replicas_ED,
    price_XD,
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
        price_XD: What each device takes, see ``core.layer_cost.LayerCost.price_XD``.
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
    loads = len(load_NE)
    exact = not price_XD[1].any()
    change[:] = -1
    known_NED = np.empty((loads, experts, devices), np.int64)
    excess_N = np.empty(loads)
    bound_N = np.empty(loads)
    base = split_loads(
        load_NE,
        replicas_ED,
        price_XD,
        known_NED,
        excess_N,
        bound_N,
        TAIL_WEIGHT,
        np.inf,
        weight_N,
    )
    if base <= price:
        return 0.0
    # A candidate must soon do better on a few of the loads.
    few = loads // 4 if loads >= 16 else 0
    few_stop = -0.5 * price * few / loads
    for n in range(few):
        few_stop += weight_N[n] * excess_N[n] * (1.0 + TAIL_WEIGHT * excess_N[n])
    usage_ED = np.empty((experts, devices))
    relief_ED = np.empty((experts, devices))
    survey_set(load_NE, weight_N, replicas_ED, price_XD, known_NED, bound_N, usage_ED, relief_ED)
    copies_E = np.zeros(experts, np.int64)
    held_D = np.zeros(devices, np.int64)
    for e in range(experts):
        for d in range(devices):
            if replicas_ED[e, d] != 0:
                copies_E[e] += 1
                held_D[d] += 1
    drops = np.empty(experts * devices, np.int64)
    total = least_used(replicas_ED, usage_ED, drops)
    adds = np.argsort((-relief_ED).ravel(), kind="mergesort")
    # Penalty and price of the best changes so far.
    kept = 1 if exact else _SHORTLIST
    cost_X = np.full(kept, base)
    change_XCM = np.full((kept, 2, 4), -1)
    trial = np.full((2, 4), -1)
    exchanges = 0
    for i in range(min(max_adds, len(adds))):
        e1, d1 = adds[i] // devices, adds[i] % devices
        if relief_ED[e1, d1] <= 0.0:
            break
        trial[:] = -1
        trial[0, 2], trial[0, 3] = e1, d1
        room = total < max_replicas and held_D[d1] < capacity_D[d1]
        worth = True
        if room or not exact:
            # What does not pay even as one more replica need not be tried in place of another.
            cost = price + _trial(
                load_NE,
                weight_N,
                replicas_ED,
                price_XD,
                known_NED,
                excess_N,
                bound_N,
                trial,
                few,
                few_stop,
                cost_X[-1] - price,
            )
            worth = cost < cost_X[-1]
            if room and worth:
                _shortlist(cost, trial, cost_X, change_XCM)
        if worth and not room:
            tried = 0
            for j in range(total):
                e0, d0 = drops[j] // devices, drops[j] % devices
                if copies_E[e0] == 1 and e0 != e1:
                    continue
                if d0 != d1 and held_D[d1] >= capacity_D[d1]:
                    continue
                trial[0, 0], trial[0, 1] = e0, d0
                cost = price + _trial(
                    load_NE,
                    weight_N,
                    replicas_ED,
                    price_XD,
                    known_NED,
                    excess_N,
                    bound_N,
                    trial,
                    few,
                    few_stop,
                    cost_X[-1] - price,
                )
                if cost < cost_X[-1]:
                    _shortlist(cost, trial, cost_X, change_XCM)
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
                trial[0, 0], trial[0, 1], trial[0, 2], trial[0, 3] = e1, d0, e1, d1
                trial[1, 0], trial[1, 1], trial[1, 2], trial[1, 3] = e0, d1, e0, d0
                cost = 2.0 * price + _trial(
                    load_NE,
                    weight_N,
                    replicas_ED,
                    price_XD,
                    known_NED,
                    excess_N,
                    bound_N,
                    trial,
                    few,
                    few_stop,
                    cost_X[-1] - 2.0 * price,
                )
                if cost < cost_X[-1]:
                    _shortlist(cost, trial, cost_X, change_XCM)
    if exact:
        change[:] = change_XCM[0]
        return base - cost_X[0]
    best = base
    for i in range(kept):
        if change_XCM[i, 0, 2] < 0:
            continue
        paid = price if change_XCM[i, 1, 2] < 0 else 2.0 * price
        _apply(replicas_ED, change_XCM[i], True)
        cost = paid + set_penalty(
            load_NE, weight_N, replicas_ED, price_XD, TAIL_WEIGHT, best - paid
        )
        _apply(replicas_ED, change_XCM[i], False)
        if cost < best:
            best = cost
            change[:] = change_XCM[i]
    return base - best


@compiled(
    "float64(int64[:, ::1], float64[::1], uint8[:, ::1], float64[:, ::1], float64, int64[::1])"
)
def cheapest_drop(load_NE, weight_N, replicas_ED, price_XD, limit, drop):
    """Find the replica that is missed least.

    Args:
        load_NE: Loads, int64 [N, E].
        weight_N: Their weights, float64 [N], summing to 1.
        replicas_ED: The set, uint8 [E, D]; unchanged on return.
        price_XD: What each device takes, see ``core.layer_cost.LayerCost.price_XD``.
        limit: Mean excess that the set may have without the replica.
        drop: Result: (expert, device), -1 where no drop stays within the limit.

    Returns:
        Mean excess without it, or ``limit``.
    """
    experts, devices = replicas_ED.shape
    loads = len(load_NE)
    drop[:] = -1
    known_NED = np.empty((loads, experts, devices), np.int64)
    excess_N = np.empty(loads)
    bound_N = np.empty(loads)
    split_loads(
        load_NE, replicas_ED, price_XD, known_NED, excess_N, bound_N, 0.0, np.inf, weight_N
    )
    usage_ED = np.empty((experts, devices))
    relief_ED = np.empty((experts, devices))
    survey_set(load_NE, weight_N, replicas_ED, price_XD, known_NED, bound_N, usage_ED, relief_ED)
    best = limit
    order = np.argsort(usage_ED.ravel(), kind="mergesort")
    tried = 0
    for i in range(len(order)):
        e, d = order[i] // devices, order[i] % devices
        if replicas_ED[e, d] == 0 or replicas_ED[e].sum() < 2:
            continue
        replicas_ED[e, d] = 0
        excess = set_penalty(load_NE, weight_N, replicas_ED, price_XD, 0.0, best)
        replicas_ED[e, d] = 1
        if excess < best:
            best = excess
            drop[0], drop[1] = e, d
        tried += 1
        if tried >= 8:
            break
    return best
