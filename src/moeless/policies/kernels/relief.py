"""Relieves the slowest device of a split until nothing helps.

Moves tokens to another device, or along a chain of two moves; whole experts or as many tokens as
make both ends equal. Prices are those of ``core.layer_cost.LayerCost.price_XD``: what each device
takes for being used, for an expert that it touches and for a token.

Loops compiled by numba at import (and cached on disk); the only floating point is sums and
comparisons of products, without reordering, so results are the same on every machine.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled

_EPSILON = 1e-9
"""Relative: smaller gains are rounding, and would let the search go round in circles."""


@compiled("float64(int64, int64[::1], int64[::1], float64[:, ::1])")
def device_time(d, touched_D, load_D, price_XD):
    """Time of one device, in tokens."""
    base = price_XD[0, d] if touched_D[d] > 0 else 0.0
    return base + (price_XD[1, d] * touched_D[d] + price_XD[2, d] * load_D[d])


@compiled("float64(int64, int64[::1], float64[:, ::1])")
def entry_price(d, touched_D, price_XD):
    """What one more expert costs a device."""
    if touched_D[d] == 0:
        return price_XD[0, d] + price_XD[1, d]
    return price_XD[1, d]


@compiled("float64(int64, int64[::1], float64[:, ::1])")
def _exit_saving(d, touched_D, price_XD):
    """What one expert less saves a device."""
    if touched_D[d] == 1:
        return price_XD[0, d] + price_XD[1, d]
    return price_XD[1, d]


@compiled("void(int64, int64, int64, int64, int64[:, ::1], int64[::1], int64[::1])")
def move_tokens(expert, source, target, amount, tokens_ED, load_D, touched_D):
    """Move tokens of one expert from one device to another."""
    if tokens_ED[expert, target] == 0:
        touched_D[target] += 1
    tokens_ED[expert, source] -= amount
    tokens_ED[expert, target] += amount
    if tokens_ED[expert, source] == 0:
        touched_D[source] -= 1
    load_D[source] -= amount
    load_D[target] += amount


@compiled("int64(float64, float64, int64, float64, float64, float64, float64)")
def _equalising(source_s, target_s, held, price, saving, give, take):
    """How many of ``held`` tokens to move so that source and target end nearest to equal.

    Each token takes ``give`` off the source and adds ``take`` to the target.
    """
    amount = np.int64((source_s - target_s - price) / (give + take))
    amount = max(np.int64(1), min(amount, held))
    if amount >= held:
        return held
    # Moving all of them also saves the source the touch.
    part = max(source_s - give * amount, target_s + price + take * amount)
    whole = max(source_s - saving - give * held, target_s + price + take * held)
    return held if whole <= part else amount


@compiled(
    "int64(int64, float64, int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[:, ::1],"
    " int64[::1], int64[::1], float64[::1], float64[:, ::1])"
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
    time_D,
    price_XD,
):
    """Move tokens of the slowest device to another one, the best such move; 1 if any helps."""
    best = limit
    best_e = best_d = best_n = np.int64(-1)
    source_s = time_D[slowest]
    saving = _exit_saving(slowest, touched_D, price_XD)
    give = price_XD[2, slowest]
    for i in range(guests_D[slowest]):
        e = guest_DE[slowest, i]
        held = tokens_ED[e, slowest]
        if held == 0:
            continue
        for j in range(seats_E[e]):
            d = seat_ED[e, j]
            if d == slowest:
                continue
            take = price_XD[2, d]
            price = 0.0 if tokens_ED[e, d] > 0 else entry_price(d, touched_D, price_XD)
            target_s = time_D[d]
            if target_s + price + take >= best:
                continue
            n = _equalising(source_s, target_s, held, price, saving, give, take)
            saved = saving if n == held else 0.0
            after = max(source_s - saved - give * n, target_s + price + take * n)
            if after < best:
                best, best_e, best_d, best_n = after, np.int64(e), np.int64(d), n
    if best_e < 0:
        return 0
    move_tokens(best_e, slowest, best_d, best_n, tokens_ED, load_D, touched_D)
    return 1


@compiled(
    "int64(int64, float64, int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[:, ::1],"
    " int64[::1], int64[::1], float64[::1], float64[:, ::1])"
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
    time_D,
    price_XD,
):
    """Move tokens to a device that passes others on to a third, or back; 1 if any chain helps."""
    best = limit
    e1 = d1 = n1 = e2 = d2 = n2 = np.int64(-1)
    source_s = time_D[slowest]
    saving = _exit_saving(slowest, touched_D, price_XD)
    give = price_XD[2, slowest]
    for i in range(guests_D[slowest]):
        e = guest_DE[slowest, i]
        held = tokens_ED[e, slowest]
        if held == 0:
            continue
        for j in range(seats_E[e]):
            v = seat_ED[e, j]
            if v == slowest:
                continue
            price = 0.0 if tokens_ED[e, v] > 0 else entry_price(v, touched_D, price_XD)
            middle_s = time_D[v]
            pass_on = price_XD[2, v]
            for k in range(guests_D[v]):
                f = guest_DE[v, k]
                held_f = tokens_ED[f, v]
                if held_f == 0 or f == e:
                    continue
                for m in range(seats_E[f]):
                    w = seat_ED[f, m]
                    if w == v:
                        continue
                    price_f = 0.0 if tokens_ED[f, w] > 0 else entry_price(w, touched_D, price_XD)
                    if w == slowest:
                        # An exchange: all of one comes back for some or all of the other.
                        there_s = source_s + price_f + give * held_f
                        here_s = middle_s - price_XD[1, v] - pass_on * held_f
                        if here_s + price + pass_on >= best:
                            continue
                        # The source keeps what came back, so it only saves the touch.
                        left = price_XD[1, slowest]
                        n = _equalising(there_s, here_s, held, price, left, give, pass_on)
                        saved = left if n == held else 0.0
                        after = max(there_s - saved - give * n, here_s + price + pass_on * n)
                        if after < best:
                            best = after
                            e1, d1, n1 = np.int64(e), np.int64(v), n
                            e2, d2, n2 = np.int64(f), np.int64(w), held_f
                        continue
                    take = price_XD[2, w]
                    target_s = time_D[w]
                    if target_s + price_f + take >= best:
                        continue
                    # Whole or equalising amounts at each of the two hops.
                    level = (source_s + middle_s + target_s + price + price_f) / 3.0
                    for choice in range(4):
                        if choice & 1:
                            n = held
                        else:
                            n = min(held, max(np.int64(1), np.int64((source_s - level) / give)))
                        if choice & 2:
                            p = held_f
                        else:
                            p = min(
                                held_f,
                                max(np.int64(1), np.int64((level - target_s - price_f) / take)),
                            )
                        saved = saving if n == held else 0.0
                        saved_f = price_XD[1, v] if p == held_f else 0.0
                        after = max(
                            source_s - saved - give * n,
                            middle_s + price + pass_on * n - saved_f - pass_on * p,
                            target_s + price_f + take * p,
                        )
                        if after < best:
                            best = after
                            e1, d1, n1 = np.int64(e), np.int64(v), n
                            e2, d2, n2 = np.int64(f), np.int64(w), p
    if e1 < 0:
        return 0
    move_tokens(e1, slowest, d1, n1, tokens_ED, load_D, touched_D)
    move_tokens(e2, d1, d2, n2, tokens_ED, load_D, touched_D)
    return 1


@compiled(
    "float64(int32[:, ::1], int32[::1], int32[:, ::1], int32[::1], int64[:, ::1], int64[::1],"
    " int64[::1], float64[:, ::1], float64)"
)
def improve_split(
    seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D, touched_D, price_XD, good_enough
):
    """Relieve the slowest device until nothing helps; returns its time."""
    devices = len(load_D)
    time_D = np.empty(devices)
    touched_D[:] = 0
    for e in range(len(seats_E)):
        for j in range(seats_E[e]):
            if tokens_ED[e, seat_ED[e, j]] > 0:
                touched_D[seat_ED[e, j]] += 1
    for _ in range(4 * devices + 16):
        slowest, slowest_s = 0, -1.0
        for d in range(devices):
            time_D[d] = device_time(d, touched_D, load_D, price_XD)
            if time_D[d] > slowest_s:
                slowest, slowest_s = d, time_D[d]
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
            time_D,
            price_XD,
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
            time_D,
            price_XD,
        ):
            return slowest_s
    slowest_s = 0.0
    for d in range(devices):
        slowest_s = max(slowest_s, device_time(d, touched_D, load_D, price_XD))
    return slowest_s
