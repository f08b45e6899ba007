"""Says for every expert why it has the replicas it has, and what one more would do."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeless.bootstrap.placements.placement import counts_of
from moeless.bootstrap.placements.placement_plan import LayerPlan, PlacementPlan
from moeless.core.plan import CountArray, ReplicaArray

_CANDIDATES = 4
"""Devices, from the least loaded one on, that a next replica is tried on."""

_WHY_NOT = {
    "static": "static expert parallelism never replicates",
    "eplb": "eplb counts replicas before it seats them, and had none left for this expert",
    "paper": "the paper's scaler stops once replica loads vary by less than its threshold, or at "
    "its cap",
    "swift": "swift changes little at a time, and only for a gain above its threshold",
    "moeless": "the gain is below the price of a replica",
}


@dataclass(frozen=True, kw_only=True)
class ExpertReason:
    """One expert of a layer.

    Args:
        expert: Logical expert.
        tokens: Its load.
        share: Load as a multiple of the mean device load; None without any load in the layer.
        devices: Devices that hold a replica.
        next_gain: Share of the hottest device's tokens that one more replica would take off it,
            0 for nothing.
        next_device: Where that replica would be best, None where no device could take it.
        limit: Why it has no more replicas.
        why: The whole reason, one sentence.
    """

    expert: int
    tokens: float
    share: float | None
    devices: tuple[int, ...]
    next_gain: float
    next_device: int | None
    limit: str
    why: str


def explain_layer(plan: PlacementPlan, layer: LayerPlan) -> tuple[ExpertReason, ...]:
    """Explain one layer, under the split that the policy is served with.

    Args:
        plan: The plan that the layer is part of.
        layer: The layer.
    """
    splitter = plan.policies.splitter
    count_E = counts_of(plan.task, layer.load_E)

    def tokens_D(replicas_ED: ReplicaArray) -> CountArray:
        split: CountArray = splitter.split(count_E, replicas_ED.astype(np.bool_)).sum(axis=0)
        return split

    now_D = tokens_D(layer.replicas_ED)
    experts = range(len(layer.load_E))
    return tuple(_explain(plan, layer, expert, now_D, tokens_D) for expert in experts)


def _explain(
    plan: PlacementPlan,
    layer: LayerPlan,
    expert: int,
    now_D: CountArray,
    tokens_D: Callable[[ReplicaArray], CountArray],
) -> ExpertReason:
    load = float(layer.load_E[expert])
    held = layer.replicas_ED[expert] > 0
    mean = float(layer.load_E.sum()) / len(now_D)
    share = load / mean if mean > 0 else None
    gain, device = _next_replica(layer, expert, now_D, tokens_D) if load > 0 else (0.0, None)
    limit = _limit(plan, layer, expert, gain, int(now_D.argmax()))
    return ExpertReason(
        expert=expert,
        tokens=load,
        share=share,
        devices=tuple(np.flatnonzero(held).tolist()),
        next_gain=gain,
        next_device=device,
        limit=limit,
        why=f"{_reason(plan, int(held.sum()), share)}; {limit}",
    )


def _next_replica(
    layer: LayerPlan,
    expert: int,
    now_D: CountArray,
    tokens_D: Callable[[ReplicaArray], CountArray],
) -> tuple[float, int | None]:
    """The best gain of one more replica, and its device."""
    lacking = np.flatnonzero(layer.replicas_ED[expert] == 0)
    if not lacking.size or not now_D.any():
        return 0.0, None
    order = lacking[np.argsort(now_D[lacking], kind="stable")][:_CANDIDATES]
    hottest = int(now_D.max())
    best, where = 0.0, int(order[0])
    for device in order.tolist():
        tried_ED = layer.replicas_ED.copy()
        tried_ED[expert, device] = 1
        gain = (hottest - int(tokens_D(tried_ED).max())) / hottest
        if gain > best:
            best, where = gain, device
    return best, where


def _reason(plan: PlacementPlan, replicas: int, share: float | None) -> str:
    if not share:
        kept = "one replica keeps it reachable" if replicas == 1 else "its replicas fill slots"
        return f"no tokens came, {kept}"
    if replicas == 1:
        return f"one replica carries {share:.2f} x the mean device load"
    part = "an even part of it is" if plan.policies.name == "moeless" else "each replica takes"
    return (
        f"one device alone would carry {share:.2f} x the mean device load, so it has {replicas} "
        f"replicas; {part} {share / replicas:.2f} x"
    )


def _limit(plan: PlacementPlan, layer: LayerPlan, expert: int, gain: float, hottest: int) -> str:
    held_D = layer.replicas_ED.sum(axis=0, dtype=np.int64)
    lacking = layer.replicas_ED[expert] == 0
    if layer.load_E[expert] == 0:
        return "nothing to gain from more"
    if not lacking.any():
        return "it is on every device already"
    effect = (
        f"one more would take {gain:.1%} off the hottest device"
        if gain > 0
        else f"one more would take nothing off the hottest device ({hottest})"
    )
    if not (lacking & (held_D < plan.capacity_D)).any():
        full = "no device without it has a free slot"
        used = f"{held_D.sum()} of {plan.capacity_D.sum()} in use"
        return f"{effect}; {full} ({used})"
    if gain <= 0:
        return effect
    return f"{effect}; {_WHY_NOT.get(plan.policies.name, 'the policy asked for none')}"
