"""Planners take what predictors hand out: arrays that are read-only."""

import numpy as np
import pytest

from moeless.bootstrap.policies import PolicyOptions, build_policy_set
from moeless.core.clock import SystemClock
from moeless.core.layer_cost import LayerCost
from moeless.core.plan import PlanRequest


@pytest.mark.parametrize("name", ["moeless", "paper", "eplb", "swift", "static", "even_split"])
def test_a_request_of_read_only_arrays_is_planned(name):
    arrays = {
        "load_E": np.array([90.0, 5.0, 30.0, 1.0, 0.0, 12.0, 7.0, 3.0]),
        "previous_ED": np.zeros((8, 2), dtype=np.uint8),
        "alive_ED": np.zeros((8, 2), dtype=np.uint8),
        "capacity_D": np.array([6, 6], dtype=np.int64),
    }
    for array in arrays.values():
        array.flags.writeable = False
    policies = build_policy_set(
        name, cost=LayerCost(token_s=1.0), options=PolicyOptions(), clock=SystemClock()
    )
    plan = policies.planner.plan(PlanRequest(step=1, layer=0, **arrays))
    assert (plan.replicas_ED.sum(axis=1) >= 1).all()
