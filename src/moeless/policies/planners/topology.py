"""The replica set to begin with, before anything is known about loads.

Links between devices matter more than which experts they belong to: k replicas in all leave at
least E + D - k groups of devices that cannot help each other, whatever the loads. So extra
replicas are spread like a circulant graph: the r-th expert of every device is linked to the
device r-th in a list of odd and even strides. This module must not know loads.
"""

from collections.abc import Sequence

import numpy as np

from moeless.core.plan import ReplicaArray


def seat_homes(num_experts: int, capacity: Sequence[int]) -> list[int]:
    """One device per expert: contiguous blocks, as even as the capacities allow.

    Args:
        num_experts: E.
        capacity: Replicas that each device may hold [D]; the sum is at least E.

    Returns:
        Device of each expert [E], ascending.
    """
    size = [0] * len(capacity)
    for _ in range(num_experts):
        open_devices = [d for d, slots in enumerate(capacity) if size[d] < slots]
        size[min(open_devices, key=lambda d: size[d])] += 1
    return [device for device, experts in enumerate(size) for _ in range(experts)]


def first_topology(num_experts: int, capacity: Sequence[int], max_replicas: int) -> ReplicaArray:
    """Homes in contiguous blocks and circulant links.

    Args:
        num_experts: E.
        capacity: Replicas that each device may hold [D]; the sum is at least E.
        max_replicas: Replicas in all; at least E.

    Returns:
        uint8 [E, D], no expert twice on a device; fewer than ``max_replicas`` where there is no
        room.
    """
    home = seat_homes(num_experts, capacity)
    devices = [d for d, slots in enumerate(capacity) if slots > 0]
    place = {device: i for i, device in enumerate(devices)}
    replicas_ED = np.zeros((num_experts, len(capacity)), dtype=np.uint8)
    free = list(capacity)
    rank = []
    for expert, device in enumerate(home):
        replicas_ED[expert, device] = 1
        free[device] -= 1
        rank.append(expert - home.index(device))
    strides = [*range(1, len(devices), 2), *range(2, len(devices), 2)]
    left = max_replicas - num_experts
    for turn in range(len(strides)):
        for expert in sorted(range(num_experts), key=lambda e: (rank[e], e)):
            if left <= 0:
                return replicas_ED
            stride = strides[(rank[expert] + turn) % len(strides)]
            device = devices[(place[home[expert]] + stride) % len(devices)]
            if free[device] > 0 and not replicas_ED[expert, device]:
                replicas_ED[expert, device] = 1
                free[device] -= 1
                left -= 1
    return replicas_ED


def random_topology(
    num_experts: int,
    capacity: Sequence[int],
    max_replicas: int,
    rng: np.random.Generator,
) -> ReplicaArray:
    """Experts on devices in random order, as even as the capacities allow, and random links.

    Args:
        num_experts: E.
        capacity: Replicas that each device may hold [D]; the sum is at least E.
        max_replicas: Replicas in all; at least E.
        rng: Where chance comes from.

    Returns:
        uint8 [E, D]; fewer than ``max_replicas`` where there is no room.
    """
    home = seat_homes(num_experts, capacity)
    replicas_ED = np.zeros((num_experts, len(capacity)), dtype=np.uint8)
    free = list(capacity)
    for expert, device in zip(rng.permutation(num_experts).tolist(), home, strict=True):
        replicas_ED[expert, device] = 1
        free[device] -= 1
    left = max_replicas - num_experts
    for place in rng.permutation(replicas_ED.size).tolist():
        expert, device = divmod(place, len(capacity))
        if left > 0 and free[device] > 0 and not replicas_ED[expert, device]:
            replicas_ED[expert, device] = 1
            free[device] -= 1
            left -= 1
    return replicas_ED


def rename_devices(
    replicas_ED: ReplicaArray, like_ED: ReplicaArray, kinds: Sequence[object]
) -> ReplicaArray:
    """Let devices of one kind trade places so that few replicas differ from another set.

    Args:
        replicas_ED: A set, uint8 [E, D].
        like_ED: The set to resemble, uint8 [E, D].
        kinds: What devices must have in common, such as their capacity [D].

    Returns:
        The set with its columns reordered.
    """
    devices = len(kinds)
    common_DD = replicas_ED.T.astype(np.int64) @ like_ED.astype(np.int64)
    order = np.argsort(-common_DD, axis=None, kind="stable").tolist()
    renamed_ED = np.zeros_like(replicas_ED)
    taken: set[int] = set()
    placed: set[int] = set()
    for pair in order:
        source, target = divmod(pair, devices)
        fits = kinds[source] == kinds[target]
        if source not in placed and target not in taken and fits:
            renamed_ED[:, target] = replicas_ED[:, source]
            placed.add(source)
            taken.add(target)
    return renamed_ED


def carry_over(
    previous_ED: ReplicaArray, capacity: Sequence[int], max_replicas: int
) -> ReplicaArray:
    """Keep a set as far as new capacities allow, and complete it with homes and links.

    Args:
        previous_ED: The set so far, uint8 [E, D].
        capacity: Replicas that each device may hold now [D]; the sum is at least E.
        max_replicas: Replicas in all; at least E.

    Returns:
        uint8 [E, D]; every expert has a replica.
    """
    experts, devices = previous_ED.shape
    kept_ED = np.zeros_like(previous_ED)
    free = list(capacity)
    spare = min(max_replicas, sum(capacity)) - experts
    # Last copies first; a second one only where no expert's only place is taken for it.
    for first in (True, False):
        for expert, device in np.argwhere(previous_ED > 0).tolist():
            only = not kept_ED[expert].any()
            if only is first and free[device] > 0 and (only or spare > 0):
                kept_ED[expert, device] = 1
                free[device] -= 1
                spare -= not only
    for expert in np.flatnonzero(~kept_ED.any(axis=1)).tolist():
        device = max(range(devices), key=lambda d: (free[d], -d))
        if free[device] == 0:
            return first_topology(experts, capacity, max_replicas)
        kept_ED[expert, device] = 1
        free[device] -= 1
    for expert, device in np.argwhere(first_topology(experts, capacity, max_replicas)).tolist():
        if kept_ED.sum() < max_replicas and free[device] > 0 and not kept_ED[expert, device]:
            kept_ED[expert, device] = 1
            free[device] -= 1
    return kept_ED
