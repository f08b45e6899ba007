"""What a placement is planned from, and what comes out.

This module must not know how placements are chosen (``placement``) or shown.
"""

from dataclasses import dataclass, replace

import numpy as np

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray, LoadArray, ReplicaArray
from moeless.core.policy_set import PolicySet
from moeless.workloads.formats.expert_loads import ExpertLoads
from moeless.workloads.formats.placements.placement import Placement

TOKENS_ONLY = LayerCost(token_s=1.0)
"""Where no time model is named, a device is as busy as it has tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementTask:
    """What to plan.

    Args:
        loads: Tokens per layer and expert.
        num_devices: D.
        policy: Name of the planner.
        slots: Replicas that a layer may have on all devices together; the first devices have one
            more where D does not divide it.
        device_memory_bytes: Instead of ``slots``: memory for experts on each device, divided
            equally among the layers.
        expert_bytes: Bytes of one expert, for memory and for bytes to copy.
        current: The placement in force; None is static expert parallelism.
        cost: What tokens and experts cost in time.
        equal_slots: Fill slots until every device and layer has equally many, for systems whose
            slots are fixed.
    """

    loads: ExpertLoads
    num_devices: int
    policy: str
    slots: int | None = None
    device_memory_bytes: int | None = None
    expert_bytes: int | None = None
    current: Placement | None = None
    cost: LayerCost = TOKENS_ONLY
    equal_slots: bool = False

    @property
    def timed(self) -> bool:
        """Whether time counts, instead of tokens."""
        return self.cost != TOKENS_ONLY

    @property
    def scalable(self) -> bool:
        """Whether only proportions of tokens matter, because nothing but them costs time."""
        return replace(self.cost, speeds=()) == TOKENS_ONLY


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """What was planned for one layer; figures are those of ``balance``.

    Args:
        layer_id: Absolute layer.
        load_E: Tokens per expert [E].
        replicas_ED: The placement, uint8 [E, D].
        static: Static expert parallelism.
        even: The placement with each expert's tokens divided evenly over its replicas.
        min_time: The placement with tokens divided so that all devices finish together.
        copies: Replicas that the placement in force does not have.
        filled: Replicas that only fill a slot (``equal_slots``).
    """

    layer_id: int
    load_E: LoadArray
    replicas_ED: ReplicaArray
    static: float | None
    even: float | None
    min_time: float | None
    copies: int
    filled: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementPlan:
    """A planned placement with its figures.

    Args:
        task: What was asked.
        capacity_D: Replicas of a layer that each device may hold, int64 [D].
        policies: What the policy's name stands for.
        layers: One entry per layer.
    """

    task: PlacementTask
    capacity_D: CountArray
    policies: PolicySet
    layers: tuple[LayerPlan, ...]

    @property
    def placement(self) -> Placement:
        """The placement, for writing."""
        return Placement(
            layer_ids=tuple(layer.layer_id for layer in self.layers),
            replicas_LED=np.stack([layer.replicas_ED for layer in self.layers]),
        )

    @property
    def copies(self) -> int:
        """Replicas to load, all layers."""
        return sum(layer.copies for layer in self.layers)

    def copy_bytes(self, copies: int) -> int | None:
        """Bytes of so many replicas, None where the size of an expert is not known."""
        each = self.task.expert_bytes
        return None if each is None else copies * each
