"""DeepSeek's Expert Parallelism Load Balancer as a pure function: loads in, slots out.

A slot is a place for one expert's weights; every device has the same number. This module must not
know plans, devices that come and go, or what is warm (``moeless.policies.planners.eplb``).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import checked_load
from moeless.errors import PlanError
from moeless.policies.planners.eplb_packing import Rounding, pack_evenly, replicate_experts


def rebalance_experts(
    load_LE: NDArray[np.generic],
    *,
    num_slots: int,
    num_devices: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    single_precision: bool = False,
) -> NDArray[np.int64]:
    """Choose the expert of every slot, layer by layer.

    Where the nodes divide the expert groups, groups are packed onto nodes first, experts are
    replicated within their node, and the replicas are packed onto its devices (hierarchical).
    Elsewhere groups and nodes are ignored (global).

    Args:
        load_LE: Tokens per expert, any real dtype, [L, E] or one layer [E].
        num_slots: R, slots in all; a multiple of ``num_devices`` and at least E.
        num_devices: D.
        num_groups: Expert groups of group-limited routing, consecutive and of equal size.
        num_nodes: Nodes, each of D / nodes consecutive devices.
        single_precision: Compute in float32 like the original, so that near-ties fall the same
            way. Double precision counts exactly beyond 2^24 tokens.

    Returns:
        Physical-to-logical map, int64 [L, R], or [R] for one layer: device d holds the slots
        d * R/D ... (d + 1) * R/D - 1. One device may hold two replicas of one expert.

    Raises:
        PlanError: A load is not a token count, or the numbers do not divide.

    Source: https://github.com/deepseek-ai/EPLB (MIT), ``rebalance_experts``, written anew.
    Replica counts and device loads are the original's; where replicas tie, ours takes the lowest
    index and the original what its unstable sort gives.
    """
    layers = load_LE[None] if load_LE.ndim == 1 else load_LE
    if layers.ndim != 2 or layers.size == 0:
        raise PlanError(f"loads have shape {load_LE.shape}, expected [layers, experts]")
    if num_nodes < 1 or num_groups < 1:
        raise PlanError(f"{num_groups} groups on {num_nodes} nodes; use at least 1 of each")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    cluster = _Cluster(num_slots, num_devices, num_groups, num_nodes)
    cluster.check(layers.shape[1])
    rounded: Rounding = _round_to_single if single_precision else float
    slots = []
    for layer, row_E in enumerate(layers):
        loads = [rounded(load) for load in checked_load(row_E, layer=layer).tolist()]
        slots.append(_rebalance_layer(loads, cluster, rounded))
    slots_LR = np.array(slots, dtype=np.int64)
    return slots_LR[0] if load_LE.ndim == 1 else slots_LR


@dataclass(frozen=True)
class _Cluster:
    slots: int
    devices: int
    groups: int
    nodes: int

    def check(self, experts: int) -> None:
        if self.devices < 1 or self.slots % self.devices:
            raise PlanError(
                f"{self.slots} slots on {self.devices} devices: EPLB gives every device equally "
                f"many; use a multiple of the devices"
            )
        if self.slots < experts:
            raise PlanError(f"{self.slots} slots for {experts} experts; use at least {experts}")
        if experts % self.groups:
            raise PlanError(
                f"{experts} experts in {self.groups} groups: groups have equal size; use a "
                f"divisor of {experts}"
            )
        if self.devices % self.nodes:
            raise PlanError(
                f"{self.devices} devices on {self.nodes} nodes: nodes have equally many; use a "
                f"divisor of {self.devices}"
            )


def _rebalance_layer(loads: list[float], cluster: _Cluster, rounded: Rounding) -> list[int]:
    """The expert of each slot of one layer [R]."""
    slots: list[int] = []
    for experts in _experts_of_nodes(loads, cluster, rounded):
        own = [loads[expert] for expert in experts]
        replicas, counts = replicate_experts(own, cluster.slots // cluster.nodes, rounded=rounded)
        shares = [rounded(load / count) for load, count in zip(own, counts, strict=True)]
        weights = [shares[expert] for expert in replicas]
        for pack in pack_evenly(weights, cluster.devices // cluster.nodes, rounded=rounded):
            slots.extend(experts[replicas[item]] for item in pack)
    return slots


def _experts_of_nodes(loads: list[float], cluster: _Cluster, rounded: Rounding) -> list[list[int]]:
    """The experts of each node, whole groups, in the order in which the groups were packed."""
    if cluster.nodes == 1 and cluster.groups == 1:
        return [list(range(len(loads)))]
    size = len(loads) // cluster.groups
    first = range(0, len(loads), size)
    weights = [rounded(sum(loads[expert : expert + size])) for expert in first]
    packs = pack_evenly(weights, cluster.nodes, rounded=rounded)
    return [[first[group] + i for group in pack for i in range(size)] for pack in packs]


def _round_to_single(value: float) -> float:
    """The nearest float32. Rounding a double result once gives what float32 arithmetic gives."""
    return float(np.float32(value))
