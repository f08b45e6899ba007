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
from moeless.policies.kernels.token_flow import min_max_split

_SMALL = 64
"""Experts x devices up to which more starts are tried."""

GOOD_ENOUGH = 1.001
"""Times the lower bound: what is as close as that is not improved further."""

_STOP_STARTING = 1.004
"""Times the lower bound: what is as close as that is not begun anew."""

_EPSILON = 1e-9
"""Relative: smaller gains are rounding, and would let the search go round in circles."""


@compiled("float64(int64, int64, float64, float64)")
def _time(touched, load, touch, token):
    return touch * touched + token * load


@compiled(
    "void(int64[::1], int64[::1], int32[:, ::1], int32[::1], int64[:, ::1], int64[::1],"
    " float64, float64)"
)
def _seat_whole_experts(count_E, order_E, seat_ED, seats_E, tokens_ED, load_D, touch, token):
    """Give each expert to one device: those without a choice first, then the largest first."""
    tokens_ED[:] = 0
    load_D[:] = 0
    touched_D = np.zeros(len(load_D), np.int64)
    experts = len(count_E)
    for e in range(experts):
        if seats_E[e] == 1:
            d = seat_ED[e, 0]
            tokens_ED[e, d] = count_E[e]
            load_D[d] += count_E[e]
            touched_D[d] += 1
    for i in range(experts):
        e = order_E[i]
        if seats_E[e] < 2:
            continue
        best = seat_ED[e, 0]
        best_t = _time(touched_D[best], load_D[best], touch, token)
        for j in range(1, seats_E[e]):
            d = seat_ED[e, j]
            t = _time(touched_D[d], load_D[d], touch, token)
            if t < best_t or (t == best_t and d < best):
                best, best_t = d, t
        tokens_ED[e, best] = count_E[e]
        load_D[best] += count_E[e]
        touched_D[best] += 1


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


@compiled("void(int64, int64, int64, int64, int64[:, ::1], int64[::1], int64[::1])")
def _move(expert, source, target, amount, tokens_ED, load_D, touched_D):
    """Move tokens of one expert from one device to another."""
    if tokens_ED[expert, target] == 0:
        touched_D[target] += 1
    tokens_ED[expert, source] -= amount
    tokens_ED[expert, target] += amount
    if tokens_ED[expert, source] == 0:
        touched_D[source] -= 1
    load_D[source] -= amount
    load_D[target] += amount


@compiled("int64(float64, float64, int64, float64, float64, float64)")
def _equalising(source_s, target_s, held, price, touch, token):
    """How many of ``held`` tokens to move so that source and target end nearest to equal."""
    amount = np.int64((source_s - target_s - price) / (2.0 * token))
    amount = max(np.int64(1), min(amount, held))
    if amount >= held:
        return held
    # Moving all of them also saves the source the touch.
    part = max(source_s - token * amount, target_s + price + token * amount)
    whole = max(source_s - touch - token * held, target_s + price + token * held)
    return held if whole <= part else amount


@compiled(
    "int64(int64, float64, int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[:, ::1],"
    " int64[::1], int64[::1], float64, float64)"
)
def _relieve_directly(
    slowest,
    limit,
    seat_ED,
    seats_E,
    guest_DE,
    guests_D,
    tokens_ED,
    load_D,
    touched_D,
    touch,
    token,
):
    """Move tokens of the slowest device to another one, the best such move; 1 if any helps."""
    best = limit
    best_e = best_d = best_n = np.int64(-1)
    source_s = _time(touched_D[slowest], load_D[slowest], touch, token)
    for i in range(guests_D[slowest]):
        e = guest_DE[slowest, i]
        held = tokens_ED[e, slowest]
        if held == 0:
            continue
        for j in range(seats_E[e]):
            d = seat_ED[e, j]
            if d == slowest:
                continue
            price = 0.0 if tokens_ED[e, d] > 0 else touch
            target_s = _time(touched_D[d], load_D[d], touch, token)
            if target_s + price + token >= best:
                continue
            n = _equalising(source_s, target_s, held, price, touch, token)
            saved = touch if n == held else 0.0
            after = max(source_s - saved - token * n, target_s + price + token * n)
            if after < best:
                best, best_e, best_d, best_n = after, np.int64(e), np.int64(d), n
    if best_e < 0:
        return 0
    _move(best_e, slowest, best_d, best_n, tokens_ED, load_D, touched_D)
    return 1


@compiled(
    "int64(int64, float64, int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[:, ::1],"
    " int64[::1], int64[::1], float64, float64)"
)
def _relieve_by_chain(
    slowest,
    limit,
    seat_ED,
    seats_E,
    guest_DE,
    guests_D,
    tokens_ED,
    load_D,
    touched_D,
    touch,
    token,
):
    """Move tokens to a device that passes others on to a third, or back; 1 if any chain helps."""
    best = limit
    e1 = d1 = n1 = e2 = d2 = n2 = np.int64(-1)
    source_s = _time(touched_D[slowest], load_D[slowest], touch, token)
    for i in range(guests_D[slowest]):
        e = guest_DE[slowest, i]
        held = tokens_ED[e, slowest]
        if held == 0:
            continue
        for j in range(seats_E[e]):
            v = seat_ED[e, j]
            if v == slowest:
                continue
            price = 0.0 if tokens_ED[e, v] > 0 else touch
            middle_s = _time(touched_D[v], load_D[v], touch, token)
            for k in range(guests_D[v]):
                f = guest_DE[v, k]
                held_f = tokens_ED[f, v]
                if held_f == 0 or f == e:
                    continue
                for m in range(seats_E[f]):
                    w = seat_ED[f, m]
                    if w == v:
                        continue
                    price_f = 0.0 if tokens_ED[f, w] > 0 else touch
                    if w == slowest:
                        # An exchange: all of one comes back for some or all of the other.
                        there_s = source_s + price_f + token * held_f
                        here_s = middle_s - touch - token * held_f
                        if here_s + price + token >= best:
                            continue
                        n = _equalising(there_s, here_s, held, price, touch, token)
                        saved = touch if n == held else 0.0
                        after = max(there_s - saved - token * n, here_s + price + token * n)
                        if after < best:
                            best = after
                            e1, d1, n1 = np.int64(e), np.int64(v), n
                            e2, d2, n2 = np.int64(f), np.int64(w), held_f
                        continue
                    target_s = _time(touched_D[w], load_D[w], touch, token)
                    if target_s + price_f + token >= best:
                        continue
                    # Whole or equalising amounts at each of the two hops.
                    level = (source_s + middle_s + target_s + price + price_f) / 3.0
                    for choice in range(4):
                        if choice & 1:
                            n = held
                        else:
                            n = min(held, max(np.int64(1), np.int64((source_s - level) / token)))
                        if choice & 2:
                            p = held_f
                        else:
                            p = min(
                                held_f,
                                max(np.int64(1), np.int64((level - target_s - price_f) / token)),
                            )
                        saved = touch if n == held else 0.0
                        saved_f = touch if p == held_f else 0.0
                        after = max(
                            source_s - saved - token * n,
                            middle_s + price + token * n - saved_f - token * p,
                            target_s + price_f + token * p,
                        )
                        if after < best:
                            best = after
                            e1, d1, n1 = np.int64(e), np.int64(v), n
                            e2, d2, n2 = np.int64(f), np.int64(w), p
    if e1 < 0:
        return 0
    _move(e1, slowest, d1, n1, tokens_ED, load_D, touched_D)
    _move(e2, d1, d2, n2, tokens_ED, load_D, touched_D)
    return 1


@compiled(
    "float64(int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[:, ::1], int64[::1],"
    " int64[::1], float64, float64, float64)"
)
def improve_split(
    seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D, touched_D, touch, token, good_enough
):
    """Relieve the slowest device until nothing helps; returns its time."""
    devices = len(load_D)
    touched_D[:] = 0
    for e in range(len(seats_E)):
        for j in range(seats_E[e]):
            if tokens_ED[e, seat_ED[e, j]] > 0:
                touched_D[seat_ED[e, j]] += 1
    for _ in range(4 * devices + 16):
        slowest = 0
        slowest_s = _time(touched_D[0], load_D[0], touch, token)
        for d in range(1, devices):
            t = _time(touched_D[d], load_D[d], touch, token)
            if t > slowest_s:
                slowest, slowest_s = d, t
        if slowest_s <= good_enough:
            return slowest_s
        limit = slowest_s * (1.0 - _EPSILON)
        if _relieve_directly(
            slowest,
            limit,
            seat_ED,
            seats_E,
            guest_DE,
            guests_D,
            tokens_ED,
            load_D,
            touched_D,
            touch,
            token,
        ):
            continue
        if not _relieve_by_chain(
            slowest,
            limit,
            seat_ED,
            seats_E,
            guest_DE,
            guests_D,
            tokens_ED,
            load_D,
            touched_D,
            touch,
            token,
        ):
            return slowest_s
    slowest_s = 0.0
    for d in range(devices):
        slowest_s = max(slowest_s, _time(touched_D[d], load_D[d], touch, token))
    return slowest_s


@compiled("float64(int64[::1], int64, float64, float64)")
def time_bound(count_E, devices, touch, token):
    """A lower bound of the slowest device's time for any lossless split on equal devices.

    The same as ``core.layer_cost.LayerCost.bound_s``, without base and transfers.
    """
    active, total = np.int64(0), np.int64(0)
    for e in range(len(count_E)):
        if count_E[e] > 0:
            active += 1
            total += count_E[e]
    if total == 0:
        return 0.0
    share = (total + devices - 1) // devices
    seats = (active + devices - 1) // devices
    spread = (touch * active + token * total) / devices
    return max(spread, seats * (touch + token), touch + token * share)


@compiled(
    "float64(int64[::1], int64[::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[:, ::1], int64[::1], float64, float64)"
)
def min_time_split(
    count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D, touch, token
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
        touch: Price of touching an expert on a device, any unit.
        token: Price of a token, same unit.

    Returns:
        Time of the slowest device, without its base.
    """
    experts, devices = tokens_ED.shape
    bound = time_bound(count_E, devices, touch, token)
    best_s = np.inf
    trial_ED = np.empty_like(tokens_ED)
    trial_D = np.empty_like(load_D)
    touched_D = np.empty(devices, np.int64)
    turned_E = order_E.copy()
    # Large batches are best begun by levelling tokens, small ones by seating whole experts.
    by_tokens = bound > 16.0 * touch
    # Where the problem is small, further orders cost little and find what the first ones miss.
    starts = 1 if by_tokens else 3
    if experts * devices <= _SMALL:
        starts = 3 + min(experts, 8)
    if experts * devices <= _SMALL // 2:
        starts += 3 * experts
    for start in range(starts):
        if start == (0 if by_tokens else 2):
            min_max_split(
                count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, trial_ED, trial_D
            )
        elif start == 1:
            _seat_fewest(count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, trial_ED, trial_D)
        else:
            if start > 2:
                _turn(order_E, start - 2, turned_E)
            _seat_whole_experts(
                count_E, turned_E, seat_ED, seats_E, trial_ED, trial_D, touch, token
            )
        trial_s = improve_split(
            seat_ED,
            seats_E,
            guest_DE,
            guests_D,
            trial_ED,
            trial_D,
            touched_D,
            touch,
            token,
            bound * GOOD_ENOUGH,
        )
        if trial_s < best_s:
            best_s = trial_s
            tokens_ED[:] = trial_ED
            load_D[:] = trial_D
            if best_s <= bound * (GOOD_ENOUGH if start == 0 else _STOP_STARTING):
                break
    return best_s
