"""When plans and searches take effect."""

import numpy as np

from moeless.core.plan import Plan, PlanDiff
from moeless.simulator.decisions import DeferredIntake, DeferredPlacement, DeferredSearcher
from moeless.simulator.event_loop import EventLoop, SimulatedClock


class Model:
    num_devices = 2

    def __init__(self, clock):
        self.clock = clock
        self.applied = []

    def apply(self, plan, *, decision_s):
        self.applied.append((plan.layer, self.clock.now_s(), decision_s))


def make_plan(layer):
    return Plan(step=1, layer=layer, replicas_ED=np.ones((1, 2), np.uint8), load_E=np.ones(1))


def test_plans_made_at_once_take_effect_one_after_the_other():
    loop = EventLoop(SimulatedClock())
    model = Model(loop.clock)
    placement = DeferredPlacement(model, loop=loop, decision_s=2.0)
    assert placement.apply(make_plan(3), decision_s=9.0) == PlanDiff(layer=3)
    placement.apply(make_plan(4), decision_s=9.0)
    assert model.applied == []
    assert placement.plans == {}
    loop.run()
    assert model.applied == [(3, 2.0, 2.0), (4, 4.0, 2.0)]
    assert placement.plans.keys() == {3, 4}


def test_loads_are_looked_at_when_the_control_loop_is_free():
    loop = EventLoop(SimulatedClock())
    placement = DeferredPlacement(Model(loop.clock), loop=loop, decision_s=2.0)
    taken = []

    class Intake:
        def take(self):
            taken.append(loop.clock.now_s())
            placement.apply(make_plan(len(taken)), decision_s=0.0)

    intake = DeferredIntake(Intake(), placement, loop=loop)
    for time_s in (1.0, 1.5, 2.0, 9.0):
        loop.at(time_s, intake.announce)
    loop.run()
    # Busy from 1 to 3 with the first; the two announced meanwhile are one look.
    assert taken == [1.0, 3.0, 9.0]


def test_searches_take_their_time_one_after_the_other():
    loop = EventLoop(SimulatedClock())
    searcher = DeferredSearcher(loop=loop, search_s=3.0)
    done = []
    for _ in range(2):
        searcher.submit(lambda: done.append(loop.clock.now_s()))
    loop.run()
    assert done == [3.0, 6.0]
