"""Where replicas go: the MoEless paper's Expert Placer (Algorithm 2)."""

from collections.abc import Sequence
from heapq import nsmallest

from moeless.errors import PlanError


def place_replicas(
    loads: Sequence[float],
    counts: Sequence[int],
    *,
    alive: Sequence[Sequence[int]],
    capacity: Sequence[int],
) -> bytearray:
    """Seat replicas on devices, warm ones first.

    Replicas are taken from the most to the least loaded. One with an unused alive replica of its
    expert takes that one's device (warm start); any other joins the shortest queue, the device
    with the least load so far that has room and no replica of the expert.

    Args:
        loads: Expected tokens per expert [E].
        counts: R_e, replicas per expert [E], at least 1.
        alive: Rows [E][D] that are true where a replica is, or was last placed.
        capacity: Replicas that each device may hold [D]; the sum is at least E.

    Returns:
        E x D bytes, row by row: 1 where a replica is placed. Every expert has at least one. A
        replica beyond its expert's first is left out where no device can take it, or where its
        slot is needed for an expert that has none yet.

    Raises:
        PlanError: Fewer slots than experts.

    Source: MoEless paper, section 4.3, Algorithm 2. What the text leaves open is chosen so:
    equally loaded replicas go in the order of their experts; among several alive replicas the one
    on the least loaded device is reused; equally loaded devices are taken by the fewer replicas
    placed so far, then by the lower index (by index alone, experts without load would all pile up
    on one device).
    """
    experts, devices = len(loads), len(capacity)
    placed = bytearray(experts * devices)
    # One tuple per device, (load, replicas placed, index), compares in just the order wanted.
    queue = [(0.0, 0, device) for device in range(devices)]
    free = list(capacity)
    spare = sum(free) - experts
    if spare < 0:
        raise PlanError(
            f"{devices} devices hold {sum(free)} replicas in all, {experts} experts need at "
            f"least {experts}; raise the device memory budget or add devices"
        )
    for expert in sorted(range(experts), key=lambda e: -loads[e] / counts[e]):
        # All replicas of an expert carry the same load, so they are neighbours in the order, and
        # as each excludes its device for the others, their devices are simply the first ones of
        # the queue: the alive ones, then the rest.
        wanted = min(counts[expert], spare + 1)
        row = alive[expert]
        reusable = [queue[d] for d in range(devices) if row[d] and free[d]]
        chosen = nsmallest(wanted, reusable)
        if len(chosen) < wanted:
            joinable = [queue[d] for d in range(devices) if free[d] and not row[d]]
            chosen += nsmallest(wanted - len(chosen), joinable)
        share = loads[expert] / counts[expert]
        for load, replicas, device in chosen:
            placed[expert * devices + device] = 1
            queue[device] = (load + share, replicas + 1, device)
            free[device] -= 1
        spare -= len(chosen) - 1
    return placed
