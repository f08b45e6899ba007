"""An incremental balancer: a few slots change at a re-plan, the others stay as they are."""

import math

import numpy as np

from moeless.core.plan import LoadArray, Plan, PlanRequest, ReplicaArray, checked_load
from moeless.errors import ConfigError
from moeless.policies.planners.eplb_slots import (
    SlotLayout,
    check_memory_factor,
    expected_load_D,
    knows_nothing,
    lay_out_slots,
)
from moeless.policies.planners.swift_moves import relieve_hottest
from moeless.policies.planners.swift_seats import fill_slots


class SwiftPlanner:
    """Fixed slots, no expert twice on a device, and only changes that are worth it.

    A re-plan starts from the plan in force. Each move relieves the device with the most expected
    tokens: another copy replaces one of an expert that has several, or two devices exchange an
    expert each. If all moves together do not lower the largest device load by ``threshold``, none
    is made. So a plan loads at most ``2 * max_swaps`` replicas, and more only where devices have
    come or gone: experts without a replica are always seated, and empty slots used.

    Before any load is known (the first request, if its loads are all alike), slots are filled in
    index order; without any load the plan in force stays.

    Args:
        memory_factor: Slots of a layer as a multiple of E, rounded up to a multiple of D.
        threshold: Share of the largest device load by which a re-plan must lower it, in [0, 1).
        max_swaps: Moves of one re-plan; an exchange is one move.

    Raises:
        ConfigError: A value is out of range.

    Source: the idea of vllm-ascend's Swift balancer (Apache-2.0), written anew. Like it: loads
    are those of an even split, exchanges are between the hottest device and another, 100 moves at
    most, 5% to gain. Unlike it: copies are changed one by one where that helps, instead of being
    chosen anew and then swapped; the gain is asked of each layer, not of the sum of the layers;
    traffic between pairs of devices is not limited, as weights come from the store.
    """

    def __init__(
        self, memory_factor: float = 2.0, threshold: float = 0.05, max_swaps: int = 100
    ) -> None:
        check_memory_factor(memory_factor, planner="swift")
        if not (math.isfinite(threshold) and 0.0 <= threshold < 1.0):
            raise ConfigError(
                f"planner swift: threshold {threshold} is not in [0, 1); use for example 0.05"
            )
        if max_swaps < 0:
            raise ConfigError(f"planner swift: max_swaps is {max_swaps}; use at least 0")
        self._memory_factor = memory_factor
        self._threshold = threshold
        self._max_swaps = max_swaps

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas.

        Raises:
            PlanError: A load is not a token count, or the devices cannot hold one replica of each
                expert in equally many slots.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        layout = lay_out_slots(request, memory_factor=self._memory_factor, planner="swift")
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=self._choose(load_E, request.previous_ED > 0, layout),
            load_E=load_E,
            release=True,
        )

    def _choose(
        self, load_E: LoadArray, previous_ED: np.ndarray, layout: SlotLayout
    ) -> ReplicaArray:
        first = not previous_ED.any()
        if first:
            seats_ED = layout.copies_ED(layout.initial_slots_R()) > 0
        else:
            seats_ED = fill_slots(load_E, previous_ED, layout)
        if not (first and knows_nothing(load_E)):
            before = expected_load_D(load_E, seats_ED).max()
            devices = np.array(layout.devices)
            changed_ED = seats_ED.copy()
            changed_ED[:, devices] = relieve_hottest(
                load_E, seats_ED[:, devices], max_swaps=self._max_swaps
            )
            after = expected_load_D(load_E, changed_ED).max()
            if after <= (1.0 - self._threshold) * before:
                seats_ED = changed_ED
        return seats_ED.astype(np.uint8)
