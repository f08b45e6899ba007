"""Static expert parallelism: the same contiguous block of experts per device, always."""

from typing import ClassVar

import numpy as np

from moeless.core.plan import Plan, PlanRequest, checked_load
from moeless.errors import PlanError
from moeless.policies.planners.feasibility import checked_capacity


class StaticPlanner:
    """One replica per expert; device d holds the d-th contiguous block of experts.

    Where E is not a multiple of D, the first devices hold one expert more. Devices without any
    capacity (out of service) are left out. The load is checked but has no influence.

    Source: expert parallelism of Megatron-LM, the MoEless paper's first baseline.
    """

    adaptive: ClassVar[bool] = False
    """Its plans do not follow loads, so it need not be asked again."""

    def plan(self, request: PlanRequest) -> Plan:
        """Seat the experts.

        Raises:
            PlanError: A load is not a token count, or a device cannot hold its block.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        capacity = checked_capacity(request)
        usable = [device for device, slots in enumerate(capacity) if slots > 0]
        share, rest = divmod(request.num_experts, len(usable))
        replicas_ED = np.zeros((request.num_experts, request.num_devices), dtype=np.uint8)
        first = 0
        for rank, device in enumerate(usable):
            size = share + (rank < rest)
            if size > capacity[device]:
                raise PlanError(
                    f"layer {request.layer}, device {device}: static expert parallelism puts "
                    f"{size} of {request.num_experts} experts here, but it holds "
                    f"{capacity[device]}; raise its memory budget or use another planner"
                )
            replicas_ED[first : first + size, device] = 1
            first += size
        return Plan(step=request.step, layer=request.layer, replicas_ED=replicas_ED, load_E=load_E)
