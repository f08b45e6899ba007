"""Makes a placement whole: every expert has a replica, and no slot is wasted."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import LoadArray
from moeless.policies.planners.eplb_slots import SlotLayout, expected_load_D


def fill_slots(
    load_E: LoadArray, previous_ED: NDArray[np.bool_], layout: SlotLayout
) -> NDArray[np.bool_]:
    """Keep what fits of a placement and fill the rest; a whole placement is returned unchanged.

    Devices with too many replicas drop those with the least load per replica, experts with copies
    first. Then experts without a replica are seated, most loaded first; then empty slots take the
    experts with most load per replica that their devices do not hold. Experts without load get no
    copies.

    Args:
        load_E: Tokens per expert [E].
        previous_ED: Replicas so far [E, D].
        layout: The slots.

    Returns:
        Replicas, bool [E, D]: at least one per expert, none on devices without slots, and at most
        ``layout.per_device`` on the others.
    """
    seats_ED = np.zeros_like(previous_ED)
    devices = np.array(layout.devices)
    seats_ED[:, devices] = previous_ED[:, devices]
    for device in layout.devices:
        while seats_ED[:, device].sum() > layout.per_device:
            seats_ED[_least_missed(load_E, seats_ED, device), device] = False
    missing = np.flatnonzero(~seats_ED.any(axis=1))
    for expert in missing[np.argsort(-load_E[missing], kind="stable")]:
        _seat(int(expert), load_E, seats_ED, layout)
    for device in layout.devices:
        while seats_ED[:, device].sum() < layout.per_device:
            share_E = load_E / seats_ED.sum(axis=1)
            share_E[seats_ED[:, device]] = 0.0
            expert = int(np.argmax(share_E))
            if share_E[expert] == 0.0:
                break
            seats_ED[expert, device] = True
    return seats_ED


def _seat(expert: int, load_E: LoadArray, seats_ED: NDArray[np.bool_], layout: SlotLayout) -> None:
    """Give an expert a slot on the least loaded device that has an empty one.

    Where all are full, some device holds an expert that is elsewhere too: slots are at least E.
    """
    devices = np.array(layout.devices)
    load_D = expected_load_D(load_E, seats_ED)
    empty = seats_ED[:, devices].sum(axis=0) < layout.per_device
    if empty.any():
        chosen = devices[empty]
    else:
        copied_E = seats_ED.sum(axis=1) > 1
        chosen = devices[seats_ED[copied_E][:, devices].any(axis=0)]
    device = int(chosen[np.argmin(load_D[chosen])])
    if not empty.any():
        seats_ED[_least_missed(load_E, seats_ED, device), device] = False
    seats_ED[expert, device] = True


def _least_missed(load_E: LoadArray, seats_ED: NDArray[np.bool_], device: int) -> int:
    """The device's expert that can best go: one with copies, then the one with least load."""
    held = np.flatnonzero(seats_ED[:, device])
    copies_E = seats_ED[held].sum(axis=1)
    share_E = load_E[held] / copies_E
    return int(held[np.lexsort((share_E, copies_E == 1))[0]])
