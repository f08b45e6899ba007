"""The MoEless paper's planner: Algorithm 1 counts replicas, Algorithm 2 seats them."""

import math

import numpy as np

from moeless.core.plan import Plan, PlanRequest, checked_load
from moeless.errors import ConfigError
from moeless.policies.planners.feasibility import checked_capacity
from moeless.policies.planners.paper_placer import place_replicas
from moeless.policies.planners.paper_scaler import scale_replicas


class PaperPlanner:
    """Expert Scaler and Expert Placer as printed.

    Args:
        cv_threshold: V, the coefficient of variation of replica loads that counts as balanced.
        memory_factor: Replicas of a layer in all, as a multiple of E; M_cap is
            ``floor(memory_factor * E)``, and never more than the devices hold.

    Raises:
        ConfigError: A value is out of range.

    Source: MoEless paper, sections 4.2 and 4.3. "Alive" means in the previous placement or warm.
    """

    def __init__(self, cv_threshold: float = 0.2, memory_factor: float = 2.0) -> None:
        if not (math.isfinite(cv_threshold) and cv_threshold >= 0.0):
            raise ConfigError(
                f"planner paper: cv_threshold {cv_threshold} is not a finite number of at least "
                f"0; use for example 0.2"
            )
        if not (math.isfinite(memory_factor) and memory_factor >= 1.0):
            raise ConfigError(
                f"planner paper: memory_factor {memory_factor} is not a finite number of at "
                f"least 1 (one replica per expert); use for example 2.0"
            )
        self._cv_threshold = cv_threshold
        self._memory_factor = memory_factor

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas.

        Raises:
            PlanError: A load is not a token count, or the devices cannot hold one replica of
                each expert.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        capacity = checked_capacity(request)
        experts, devices = request.num_experts, request.num_devices
        loads: list[float] = load_E.tolist()
        # The small addend keeps 1.15 x 20 (22.999... in binary) at 23.
        cap = math.floor(self._memory_factor * experts + 1e-9)
        counts = scale_replicas(
            loads,
            cv_threshold=self._cv_threshold,
            max_replicas=min(cap, sum(capacity)),
            max_per_expert=sum(slots > 0 for slots in capacity),
        )
        alive = (request.previous_ED | request.alive_ED).tolist()
        placed = place_replicas(loads, counts, alive=alive, capacity=capacity)
        replicas_ED = np.frombuffer(placed, dtype=np.uint8).reshape(experts, devices)
        return Plan(step=request.step, layer=request.layer, replicas_ED=replicas_ED, load_E=load_E)
