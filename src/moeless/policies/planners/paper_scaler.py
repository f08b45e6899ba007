"""How many replicas each expert gets: the MoEless paper's Expert Scaler (Algorithm 1)."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

# Below this the squared coefficient of variation is rounding noise (it comes out of a
# difference of two numbers near one), so that a threshold of zero still recognises balance.
_CV_SQUARED_NOISE = 1e-12


def scale_replicas(
    loads: Sequence[float], *, cv_threshold: float, max_replicas: int, max_per_expert: int
) -> list[int]:
    """Give hot experts more replicas until the replica loads are even.

    Every expert starts with one replica. While the coefficient of variation of all replica loads
    exceeds the threshold and the cap allows, the expert with the most loaded replica gets one
    more and its load is divided evenly among its replicas. An expert that already has
    ``max_per_expert`` steps aside for the next most loaded one.

    Args:
        loads: Expected tokens per expert [E], finite and not negative.
        cv_threshold: V, the coefficient of variation that counts as balanced.
        max_replicas: M_cap, replicas of the layer in all, at least E.
        max_per_expert: Replicas that one expert may have, at least 1.

    Returns:
        R_e, replicas per expert [E]; all one where the total load is zero.

    Source: MoEless paper, section 4.2, Algorithm 1. What the text leaves open is chosen so: the
    coefficient of variation is the population standard deviation divided by the mean over all
    replicas, those without load included; ties go to the expert with the lowest index; an expert
    has at most one replica per device.
    """
    total = sum(loads)
    counts = [1] * len(loads)
    if total <= 0.0:
        return counts
    # Over n replicas with loads x: CV^2 = n * sum(x^2) / sum(x)^2 - 1. The sum of x is the
    # total load whatever the number of replicas, so only sum(x^2) has to be kept up to date.
    squares = sum(load * load for load in loads)
    limit = (1.0 + max(cv_threshold * cv_threshold, _CV_SQUARED_NOISE)) * total * total
    heap = [(-load, expert) for expert, load in enumerate(loads) if load > 0.0]
    heapify(heap)
    replicas = len(loads)
    while replicas < max_replicas and heap and replicas * squares > limit:
        expert = heap[0][1]
        count = counts[expert]
        if count >= max_per_expert:
            heappop(heap)
            continue
        load = loads[expert]
        squares -= load * load / (count * (count + 1))
        counts[expert] = count + 1
        replicas += 1
        heapreplace(heap, (-load / (count + 1), expert))
    return counts
