"""The moves of the incremental balancer: each relieves the hottest device.

A move is a replacement (one slot changes its expert) or an exchange (two devices swap an expert
each). Loads are those of an even split over an expert's replicas.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import LoadArray

_LEAST_GAIN = 0.01
"""What a move must take off the hottest device, as a share of the mean device load."""

_Flags = NDArray[np.bool_]
_Indices = NDArray[np.intp]


@dataclass(frozen=True)
class _Move:
    """Cells of the placement to set and clear; the largest load of the devices it changes."""

    load: float
    seat: tuple[tuple[int, int], ...]
    clear: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _State:
    """A placement and what follows from it.

    Args:
        load_E: Tokens per expert [E].
        count_E: Replicas per expert [E].
        seats_ED: Replicas [E, D].
        load_D: Tokens per device [D].
        hottest: The device with most tokens.
        limit: What the devices that a move changes may carry after it.
        fixed_E: Experts that keep all their replicas [E].
    """

    load_E: LoadArray
    count_E: NDArray[np.int_]
    seats_ED: _Flags
    load_D: LoadArray
    hottest: int
    limit: float
    fixed_E: _Flags


def relieve_hottest(load_E: LoadArray, seats_ED: _Flags, *, max_swaps: int) -> _Flags:
    """Move while it helps.

    Each step takes, among all moves that lower the load of the device with most, the one after
    which the devices it changes have the lowest maximum; ties go to the replacement, which loads
    less, then to the lowest experts and devices. Where no move gains a hundredth of the mean
    load, the largest share on the hottest device is too large to be moved; its expert gets one
    more copy, on the device where that hurts least, and keeps it; later moves make room there.

    Args:
        load_E: Tokens per expert [E].
        seats_ED: Replicas [E, D]; at least one per expert.
        max_swaps: Moves at most.

    Returns:
        The placement with the lowest maximum on the way, bool [E, D]; as many replicas on each
        device as before.
    """
    seats_ED = best_ED = seats_ED.copy()
    mean = float(load_E.sum()) / seats_ED.shape[1]
    least_gain = _LEAST_GAIN * mean
    best = np.inf
    fixed_E = np.zeros(len(load_E), dtype=np.bool_)
    for moves in range(max_swaps + 1):
        count_E = seats_ED.sum(axis=1)
        load_D = (load_E / count_E) @ seats_ED
        hottest = int(np.argmax(load_D))
        highest = float(load_D[hottest])
        if highest < best - least_gain or moves == 0:
            best, best_ED = highest, seats_ED.copy()
        if highest <= mean + least_gain or moves == max_swaps:
            break
        state = _State(load_E, count_E, seats_ED, load_D, hottest, highest - least_gain, fixed_E)
        move = _best_move(state)
        if move is None:
            move = _one_more_copy(state)
            if move is None:
                break
            fixed_E[move.seat[0][0]] = True
        for cell in move.clear:
            seats_ED[cell] = False
        for cell in move.seat:
            seats_ED[cell] = True
    return best_ED


def _best_move(state: _State) -> _Move | None:
    found = [move for move in (_best_replacement(state), _best_exchange(state)) if move]
    return min(found, key=lambda move: move.load, default=None)


def _best_exchange(state: _State) -> _Move | None:
    """The best exchange of an expert on the hottest device with one elsewhere."""
    seats_ED, hottest = state.seats_ED, state.hottest
    given = np.flatnonzero(seats_ED[:, hottest])
    taken, partner = np.nonzero(seats_ED & ~seats_ED[:, [hottest]])
    if not taken.size:
        return None
    share_E = state.load_E / state.count_E
    moved = share_E[given][:, None] - share_E[taken][None, :]
    load = np.maximum(state.load_D[hottest] - moved, state.load_D[partner] + moved)
    load[seats_ED[given][:, partner]] = np.inf
    i, j = divmod(int(np.argmin(load)), len(taken))
    if load[i, j] > state.limit:
        return None
    here, there, device = int(given[i]), int(taken[j]), int(partner[j])
    return _Move(
        float(load[i, j]),
        seat=((here, device), (there, hottest)),
        clear=((here, hottest), (there, device)),
    )


def _best_replacement(state: _State) -> _Move | None:
    """The best change of one slot that takes enough load off the hottest device.

    Either an expert of the hottest device gets another copy, or a copy on the hottest device
    makes room for an expert that it does not hold.
    """
    here_E = state.seats_ED[:, state.hottest]
    enough = state.load_D[state.hottest] - state.limit
    relief_E = state.load_E / (state.count_E * (state.count_E + 1))
    spread = np.flatnonzero(here_E & (relief_E >= enough))
    spare_ED = _spare_ED(state)
    old_elsewhere, device = np.nonzero(spare_ED)
    large_E = state.load_E / state.count_E >= enough
    old_here = np.flatnonzero(spare_ED[:, state.hottest] & large_E)
    absent = np.flatnonzero(~here_E)
    new = np.concatenate([np.tile(spread, len(device)), np.tile(absent, len(old_here))])
    old = np.concatenate([np.repeat(old_elsewhere, len(spread)), np.repeat(old_here, len(absent))])
    where = np.concatenate(
        [
            np.repeat(device, len(spread)),
            np.full(len(absent) * len(old_here), state.hottest, dtype=np.intp),
        ]
    )
    return _least_loaded(state, new, old, where, limit=state.limit)


def _one_more_copy(state: _State) -> _Move | None:
    """A copy of the hottest device's largest share, where it hurts least."""
    can_grow_E = state.seats_ED[:, state.hottest] & (state.count_E < state.seats_ED.shape[1])
    if not can_grow_E.any():
        return None
    expert = int(np.argmax(np.where(can_grow_E, state.load_E / state.count_E, -1.0)))
    spare_ED = _spare_ED(state)
    spare_ED[expert] = False
    old, where = np.nonzero(spare_ED)
    new = np.full(len(old), expert, dtype=np.intp)
    return _least_loaded(state, new, old, where, limit=np.inf)


def _spare_ED(state: _State) -> _Flags:
    """Replicas that may go, because their expert has others and need not keep them."""
    spare: _Flags = state.seats_ED & ((state.count_E > 1) & ~state.fixed_E)[:, None]
    return spare


def _least_loaded(
    state: _State, new: _Indices, old: _Indices, where: _Indices, *, limit: float
) -> _Move | None:
    """The replacement after which the devices that it changes have the lowest maximum.

    Args:
        state: The placement.
        new: The expert that comes with each replacement [M].
        old: The expert that goes [M].
        where: The device [M].
        limit: Largest maximum to accept.
    """
    load_E, count_E, load_D, seats_ED = state.load_E, state.count_E, state.load_D, state.seats_ED
    share_E = load_E / (count_E + 1)
    slot_load = load_D[where] + share_E[new] - load_E[old] / count_E[old]
    possible = (slot_load <= limit) & ~seats_ED[new, where]
    if not possible.any():
        return None
    new, old, where, slot_load = new[possible], old[possible], where[possible], slot_load[possible]
    relief = load_E[new] / count_E[new] - share_E[new]
    burden = load_E[old] / (count_E[old] - 1) - load_E[old] / count_E[old]
    new_MD, old_MD = seats_ED[new], seats_ED[old]
    after_MD = load_D - relief[:, None] * new_MD + burden[:, None] * old_MD
    after_MD[~(new_MD | old_MD)] = -np.inf
    after_MD[np.arange(len(new)), where] = slot_load
    highest = after_MD.max(axis=1)
    best = int(np.argmin(highest))
    if highest[best] > limit:
        return None
    device = int(where[best])
    return _Move(
        float(highest[best]), seat=((int(new[best]), device),), clear=((int(old[best]), device),)
    )
