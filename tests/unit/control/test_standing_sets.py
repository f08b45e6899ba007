"""The control loop plans a standing set for several steps, and any other one for each."""

import numpy as np
import pytest

from moeless.control.controller import Controller, ControllerConfig
from moeless.core.clock import ManualClock
from moeless.core.plan import Plan, PlanDiff
from moeless.core.policy_set import PolicySet
from moeless.policies.predictors.previous import PreviousPredictor
from moeless.policies.splitters.even import EvenSplitter
from moeless.telemetry.memory import MemorySink

LAYERS, STEP_S, DECISION_S = 4, 0.01, 1e-4


APART_ED = np.eye(2, dtype=np.uint8)
"""Each expert on a device of its own."""


class Placement:
    num_devices = 2

    def __init__(self, replicas_ED):
        self.plans = []
        self.replicas_ED = replicas_ED

    def alive_ED(self, layer):
        return self.replicas_ED

    planned_ED = alive_ED

    def capacity_D(self, layer):
        return np.full(self.replicas_ED.shape[1], 2)

    def speed_D(self):
        return None

    def apply(self, plan, *, decision_s):
        self.plans.append(plan)
        return PlanDiff(layer=plan.layer)


class Planner:
    """Keeps its set; each plan takes 0.1 ms."""

    def __init__(self, clock, replicas_ED):
        self.clock, self.replicas_ED = clock, replicas_ED
        self.standing = True
        self.due = False

    def plan(self, request):
        self.clock.advance(DECISION_S)
        return Plan(
            step=request.step,
            layer=request.layer,
            replicas_ED=self.replicas_ED,
            load_E=request.load_E,
        )

    def observe(self, *, step, layer, load_E):
        pass

    def search_due(self, layer):
        return self.due

    def begin_search(self, layer):
        return lambda: lambda: None

    def stands(self, layer):
        return self.standing


class LateSearcher:
    def submit(self, search):
        pass


def make(*, share=0.01, lookahead=1, planned_ED=APART_ED, alive_ED=APART_ED):
    clock, placement = ManualClock(100.0), Placement(alive_ED)
    planner = Planner(clock, planned_ED)
    controller = Controller(
        ControllerConfig(
            model="m", num_layers=LAYERS, num_experts=2, lookahead=lookahead, share=share
        ),
        policies=PolicySet(
            name="test", planner=planner, splitter=EvenSplitter(), history=PreviousPredictor()
        ),
        placement=placement,
        clock=clock,
        sink=MemorySink(),
        searcher=LateSearcher(),
    )

    def run(steps):
        load_E = np.ones(2)
        for step in steps:
            for layer in range(LAYERS):
                if layer + 1 < LAYERS:
                    controller.forecast(step=step, layer=layer + 1, load_E=load_E)
                controller.observe(step=step, layer=layer, load_E=load_E)
            clock.advance(STEP_S - LAYERS * DECISION_S)

    return controller, placement, planner, run


def test_a_set_that_stands_is_planned_for_as_many_steps_as_the_share_asks_for():
    _, placement, _, run = make()
    run(range(1, 300))
    by_layer = {layer: [p for p in placement.plans if p.layer == layer] for layer in range(LAYERS)}
    assert all(plan.steps == 1 for plan in placement.plans[:LAYERS])
    for layer, plans in by_layer.items():
        # What a load that came true costs is nothing here, which halves the mean.
        period = max(plan.steps for plan in plans[-20:])
        assert 3 <= period <= 9
        last = plans[-1]
        assert (last.step + last.steps + layer) % period == 0


@pytest.mark.parametrize("why", ["changing", "searching", "no share"])
def test_any_other_plan_is_made_for_one_step(why):
    _, placement, planner, run = make(share=None if why == "no share" else 0.01)
    if why == "changing":
        planner.standing = False
    planner.due = why == "searching"
    run(range(1, 100))
    assert {plan.steps for plan in placement.plans} == {1}


def test_a_set_that_stands_no_more_is_planned_in_every_step_again():
    _, placement, planner, run = make()
    run(range(1, 200))
    planner.standing = False
    first = len(placement.plans)
    run(range(200, 210))
    assert {plan.steps for plan in placement.plans[first:]} == {1}


@pytest.mark.parametrize("devices", [1, 2])
def test_where_every_expert_is_everywhere_a_plan_stands_for_as_long_as_plans_may(devices):
    everywhere_ED = np.ones((2, devices), dtype=np.uint8)
    _, placement, planner, run = make(planned_ED=everywhere_ED, alive_ED=everywhere_ED)
    planner.standing = False  # a search may go on, but has nothing to find
    run(range(1, 10))
    for plan in placement.plans:
        assert 1 <= plan.steps <= 64
        assert (plan.step + plan.steps + plan.layer) % 64 == 0


def test_what_is_planned_everywhere_but_is_not_there_yet_is_looked_at_in_every_step():
    _, placement, planner, run = make(planned_ED=np.ones_like(APART_ED))
    planner.standing = False
    run(range(1, 10))
    assert {plan.steps for plan in placement.plans} == {1}
