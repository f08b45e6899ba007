"""A planner for other devices that knows the loads which an earlier one has observed."""

import numpy as np

from moeless.core.plan import PlanRequest
from moeless.policies.planners.moeless import MoelessPlanner

EXPERTS = 8


def request(devices, *, step=1, layer=0, previous_ED=None):
    return PlanRequest(
        step=step,
        layer=layer,
        load_E=np.full(EXPERTS, 50.0),
        previous_ED=np.zeros((EXPERTS, devices), dtype=np.uint8)
        if previous_ED is None
        else previous_ED,
        alive_ED=np.zeros((EXPERTS, devices), dtype=np.uint8),
        capacity_D=np.full(devices, 6),
    )


def observed(planner, *, steps=64, layer=0, hot=(0, 1)):
    """The planner after it has seen loads of which a few experts have nearly all."""
    load_E = np.full(EXPERTS, 4.0)
    load_E[list(hot)] = 300.0
    for step in range(1, steps + 1):
        planner.plan(request(2, step=step, layer=layer))
        planner.observe(step=step, layer=layer, load_E=load_E)
    return planner


def heir_of(planner):
    heir = MoelessPlanner(memory_factor=1.5)
    heir.inherit(planner)
    return heir


def test_its_first_search_is_over_what_was_observed_before():
    heir, stranger = heir_of(observed(MoelessPlanner())), MoelessPlanner(memory_factor=1.5)
    hot = {}
    for planner in (heir, stranger):
        planner.plan(request(3))
        planner.observe(step=65, layer=0, load_E=np.full(EXPERTS, 50.0))
        due = planner.search_due(0)
        if due:
            planner.search(0)
        hot[planner is heir] = due, planner.plan(request(3, step=66)).replicas_ED[:2].sum()
    assert hot[True][0]
    assert not hot[False][0]
    assert "last 64 of 65 steps" in heir.explain(0)
    assert hot[True][1] >= 4  # both have to be divided


def test_layers_that_the_heir_has_not_planned_yet_are_handed_on():
    heir = heir_of(heir_of(observed(MoelessPlanner(), layer=3)))
    heir.plan(request(4, layer=3))
    assert "last 64 of 64 steps" in heir.explain(3)


def test_loads_of_another_number_of_experts_are_not_taken_over():
    heir = heir_of(observed(MoelessPlanner(window=32)))
    heir.plan(request(3))
    assert "of 0 steps" in heir.explain(0)
