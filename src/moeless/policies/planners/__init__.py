"""Planners: which replicas of a layer's experts should exist, and on which devices."""

from moeless.core.ports import Planner
from moeless.policies.registry import Registry

PLANNERS: Registry[Planner] = Registry(
    "planner",
    {
        "eplb": "moeless.policies.planners.eplb:EplbPlanner",
        "even_split": "moeless.policies.planners.even_split:EvenSplitPlanner",
        "moeless": "moeless.policies.planners.moeless:MoelessPlanner",
        "paper": "moeless.policies.planners.paper:PaperPlanner",
        "static": "moeless.policies.planners.static:StaticPlanner",
        "swift": "moeless.policies.planners.swift:SwiftPlanner",
    },
)
