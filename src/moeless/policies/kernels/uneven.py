"""Divides tokens over devices that may be of unequal speed.

Prices are those of ``core.layer_cost.LayerCost.price_XD``. Where all devices are equal this is the
min-max flow of ``token_flow``. Otherwise devices are full at a common time instead of a common
count; the same augmenting paths make that exact, to the token.

Loops compiled by numba at import (and cached on disk); the only floating point is sums and
comparisons of products, without reordering, so results are the same on every machine.
"""

import numpy as np

from moeless.policies.kernels.compiled import compiled
from moeless.policies.kernels.relief import device_time, entry_price
from moeless.policies.kernels.token_flow import min_max_split, push_tokens, rank_devices

_ROUNDING = 1e-9
"""Tokens: so much less than a whole one is still taken for one."""


@compiled("boolean(float64[:, ::1])")
def is_even(price_XD):
    """Whether all devices take the same."""
    for d in range(1, price_XD.shape[1]):
        if price_XD[1, d] != price_XD[1, 0] or price_XD[2, d] != price_XD[2, 0]:
            return False
        if price_XD[0, d] != price_XD[0, 0]:
            return False
    return True


@compiled("float64(float64, float64[::1], float64[::1])")
def _fill_level(amount, price_D, offset_D):
    """The same as ``core.layer_cost.fill_level`` for one amount."""
    order = np.argsort(offset_D, kind="mergesort")
    rate, begun, level = 0.0, 0.0, np.inf
    for i in range(len(order)):
        d = order[i]
        rate += 1.0 / price_D[d]
        begun += offset_D[d] / price_D[d]
        level = min(level, (amount + begun) / rate)
    return level


@compiled("float64(int64[::1], float64[:, ::1])")
def time_bound(count_E, price_XD):
    """A lower bound of the slowest device's time for any lossless split, in tokens.

    The arguments are those of ``core.layer_cost.LayerCost.bound_s``; where devices are equal it is
    the same but for base and transfers.
    """
    devices = price_XD.shape[1]
    active, total = np.int64(0), np.int64(0)
    for e in range(len(count_E)):
        if count_E[e] > 0:
            active += 1
            total += count_E[e]
    if total == 0:
        return 0.0
    if is_even(price_XD):
        touch, token = price_XD[1, 0], price_XD[2, 0]
        share = (total + devices - 1) // devices
        seats = (active + devices - 1) // devices
        spread = (touch * active + token * total) / devices
        return price_XD[0, 0] + max(spread, seats * (touch + token), touch + token * share)
    base_D, touch_D, token_D = price_XD[0], price_XD[1], price_XD[2]
    # Prices at some speed, and how much work by these prices each device does in a unit of time.
    touch, token = touch_D.max(), token_D.max()
    rate_D = token / token_D
    if touch > 0.0:
        rate_D = np.maximum(rate_D, touch / touch_D)
    spread = _fill_level(touch * active + token * total, 1.0 / rate_D, base_D)
    seats = _fill_level(np.float64(active), touch_D + token_D, base_D)
    fullest = _fill_level(np.float64(total), token_D, base_D + touch_D)
    return max(spread, seats, fullest)


@compiled(
    "void(int64[::1], int64[::1], int32[:, ::1], int32[::1], int64[:, ::1], int64[::1],"
    " float64[:, ::1])"
)
def seat_whole_experts(count_E, order_E, seat_ED, seats_E, tokens_ED, load_D, price_XD):
    """Give each expert to one device: those without a choice first, then the largest first.

    Equal devices are compared before they take the expert, so that a tie goes by their load.
    """
    tokens_ED[:] = 0
    load_D[:] = 0
    touched_D = np.zeros(len(load_D), np.int64)
    even = is_even(price_XD)
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
        best_t = np.inf
        for j in range(seats_E[e]):
            d = seat_ED[e, j]
            t = device_time(d, touched_D, load_D, price_XD)
            if not even:
                t += entry_price(d, touched_D, price_XD) + price_XD[2, d] * count_E[e]
            if t < best_t or (t == best_t and d < best):
                best, best_t = d, t
        tokens_ED[e, best] = count_E[e]
        load_D[best] += count_E[e]
        touched_D[best] += 1


@compiled("int64(float64, float64, float64)")
def _room(level, offset, token):
    """Tokens that a device can have up to a level."""
    tokens = (level - offset) / token
    return max(np.int64(0), np.int64(np.floor(tokens + _ROUNDING + 1e-14 * tokens)))


@compiled("float64(float64, int64, int32[::1], int64, float64[::1], float64[::1], int64[::1])")
def _raise_level(level, need, member, members, offset_D, token_D, room_D):
    """The least level at which some devices have room for so many tokens.

    Args:
        level: The level so far.
        need: The tokens.
        member: The devices, the first ``members`` count.
        members: See there.
        offset_D: Where each device begins.
        token_D: What a token takes on each.
        room_D: Tokens that each device has room for up to the level; those of members are set.

    Returns:
        The level.
    """
    price_M = np.empty(members)
    offset_M = np.empty(members)
    for i in range(members):
        price_M[i] = token_D[member[i]]
        offset_M[i] = offset_D[member[i]]
    level = max(level, _fill_level(np.float64(need), price_M, offset_M))
    while True:
        room = np.int64(0)
        following = np.inf
        for i in range(members):
            d = member[i]
            room_D[d] = _room(level, offset_D[d], token_D[d])
            room += room_D[d]
            following = min(following, offset_D[d] + token_D[d] * (room_D[d] + 1))
        if room >= need:
            return level
        level = max(following, level * (1.0 + 1e-15))


@compiled(
    "float64(int64[::1], int64[::1], int32[:, ::1], int32[::1], int32[:, ::1], int32[::1],"
    " int64[:, ::1], int64[::1], float64[:, ::1])"
)
def split_by_tokens(
    count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D, price_XD
):
    """Divide tokens over seats as if each device touched one expert; exact where that is free.

    Args:
        count_E: Tokens of each expert, int64 [E].
        order_E: The experts from most to fewest tokens, int64 [E].
        seat_ED: Devices of each expert's replicas (``seats.Seats``); reordered within rows.
        seats_E: How many of each row count; 0 for experts without tokens.
        guest_DE: Experts of each device that have other seats as well.
        guests_D: How many of each row count.
        tokens_ED: Result, tokens of each replica, int64 [E, D].
        load_D: Result, tokens of each device, int64 [D].
        price_XD: What each device takes.

    Returns:
        Time of the slowest device as if each touched one expert, in tokens.
    """
    if is_even(price_XD):
        fullest = min_max_split(
            count_E, order_E, seat_ED, seats_E, guest_DE, guests_D, tokens_ED, load_D
        )
        return price_XD[0, 0] + price_XD[1, 0] + price_XD[2, 0] * load_D[fullest]
    devices = len(load_D)
    seat_whole_experts(count_E, order_E, seat_ED, seats_E, tokens_ED, load_D, price_XD)
    offset_D = price_XD[0] + price_XD[1]
    token_D = price_XD[2]
    room_D = np.empty(devices, np.int64)
    rank_D = np.empty(devices, np.int32)
    queue = np.arange(devices).astype(np.int32)
    scratch_XD = np.empty((4, devices), np.int32)
    level = _raise_level(0.0, load_D.sum(), queue, devices, offset_D, token_D, room_D)
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
        need = np.int64(0)
        for i in range(reached):
            need += load_D[queue[i]]
        level = _raise_level(level, need, queue, reached, offset_D, token_D, room_D)
        for d in range(devices):
            room_D[d] = _room(level, offset_D[d], token_D[d])
    slowest_s = 0.0
    for d in range(devices):
        if load_D[d] > 0:
            slowest_s = max(slowest_s, offset_D[d] + token_D[d] * load_D[d])
    return slowest_s
