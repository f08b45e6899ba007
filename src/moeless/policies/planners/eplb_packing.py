"""The two greedy steps of DeepSeek's EPLB, on one row of loads.

Pure Python on purpose: a row has at most a few hundred experts, where heaps beat array calls.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

Rounding = Callable[[float], float]
"""How a result is rounded; ``float`` leaves double precision as it is."""


def replicate_experts(
    loads: Sequence[float], num_slots: int, *, rounded: Rounding = float
) -> tuple[list[int], list[int]]:
    """Give every spare slot to the expert whose replicas carry most at that moment.

    Args:
        loads: Tokens per expert [E], finite and not negative.
        num_slots: Replicas in all, at least E.
        rounded: Precision of the quotients.

    Returns:
        The expert of each replica [num_slots]: one of each in index order, then the copies in the
        order in which they were given; and the number of replicas per expert [E].

    Source: EPLB, ``replicate_experts``. Ties go to the lowest expert, as there.
    """
    counts = [1] * len(loads)
    experts = list(range(len(loads)))
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(num_slots - len(loads)):
        expert = heap[0][1]
        experts.append(expert)
        counts[expert] += 1
        heapreplace(heap, (-rounded(loads[expert] / counts[expert]), expert))
    return experts, counts


def pack_evenly(
    weights: Sequence[float], num_packs: int, *, rounded: Rounding = float
) -> list[list[int]]:
    """Put equally many items in every pack, heaviest first, each in the lightest pack with room.

    Args:
        weights: Weight per item; their number is a multiple of ``num_packs``.
        num_packs: Number of packs.
        rounded: Precision of the sums.

    Returns:
        Items of each pack in the order in which they came. With one item per pack, item i is in
        pack i.

    Source: EPLB, ``balanced_packing``. Ties go to the lowest item and the lowest pack; the
    original leaves ties between items to an unstable sort.
    """
    items_per_pack = len(weights) // num_packs
    if items_per_pack == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    open_packs = [(0.0, pack) for pack in range(num_packs)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        total, pack = open_packs[0]
        packs[pack].append(item)
        if len(packs[pack]) == items_per_pack:
            heappop(open_packs)
        else:
            heapreplace(open_packs, (rounded(total + weights[item]), pack))
    return packs
