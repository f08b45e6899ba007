"""DeepSeek's EPLB as a planner: fixed slots, filled anew from history at every re-plan."""

from moeless.core.plan import Plan, PlanRequest, checked_load
from moeless.errors import ConfigError
from moeless.policies.planners.eplb_rebalance import rebalance_experts
from moeless.policies.planners.eplb_slots import (
    check_memory_factor,
    knows_nothing,
    lay_out_slots,
    standing_ED,
)


class EplbPlanner:
    """Redundant experts chosen and packed by DeepSeek's algorithm.

    It may spend several slots of a device on one expert. A plan then has as many copies there, for
    a splitter that gives each its share (``slots``), and has them in place of other experts.

    Before any load is known (the first request, if its loads are all alike) the experts are
    seated in index order, over and over, until the slots are full. Without any load the plan in
    force stays: nothing speaks for a copy. What is warm, and where, has no influence, as in the
    original; replicas that a plan no longer contains leave at once, because slots are fixed.

    Where only some devices are in service, the nodes are ignored.

    Args:
        memory_factor: Slots of a layer as a multiple of E, rounded up to a multiple of D.
        num_groups: Expert groups of group-limited routing; they must divide E.
        num_nodes: Nodes of equally many devices; they must divide D. Groups are kept within nodes
            only where the nodes divide the groups.

    Raises:
        ConfigError: A value is out of range.

    Source: https://github.com/deepseek-ai/EPLB (MIT); the MoEless paper's second baseline.
    """

    def __init__(
        self, memory_factor: float = 2.0, num_groups: int = 1, num_nodes: int = 1
    ) -> None:
        check_memory_factor(memory_factor, planner="eplb")
        for name, value in (("num_groups", num_groups), ("num_nodes", num_nodes)):
            if value < 1:
                raise ConfigError(f"planner eplb: {name} is {value}; use at least 1")
        self._memory_factor = memory_factor
        self._num_groups = num_groups
        self._num_nodes = num_nodes

    def plan(self, request: PlanRequest) -> Plan:
        """Choose replicas.

        Raises:
            PlanError: A load is not a token count, the devices cannot hold one replica of each
                expert in equally many slots, or groups or nodes do not divide.
        """
        load_E = checked_load(request.load_E, layer=request.layer)
        layout = lay_out_slots(request, memory_factor=self._memory_factor, planner="eplb")
        previous_ED = standing_ED(request)
        if previous_ED is not None and not load_E.any():
            copies_ED = previous_ED
        elif previous_ED is None and knows_nothing(load_E):
            copies_ED = layout.copies_ED(layout.initial_slots_R())
        else:
            whole = len(layout.devices) == layout.num_devices
            slots_R = rebalance_experts(
                load_E,
                num_slots=layout.num_slots,
                num_devices=len(layout.devices),
                num_groups=self._num_groups if whole else 1,
                num_nodes=self._num_nodes if whole else 1,
            )
            copies_ED = layout.copies_ED(slots_R)
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=copies_ED,
            load_E=load_E,
            release=True,
        )
