"""The default planner when a device has become slow, and when it has recovered."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.layer_cost import LayerCost
from moeless.core.plan import PlanRequest
from moeless.policies.planners.even_split import EvenSplitPlanner
from moeless.policies.planners.moeless import MoelessPlanner
from moeless.policies.splitters.min_time import MinTimeSplitter

COST = LayerCost(base_s=5e-5, touch_s=2e-5, token_s=1e-6)
EXPERTS, DEVICES = 8, 3
SLOW = np.array([1.0, 1.0, 0.25])


class Layer:
    """A layer that is served: planned, computed and observed, step after step."""

    def __init__(self, **options):
        self.planner = MoelessPlanner(COST, **options)
        self.replicas_ED = np.zeros((EXPERTS, DEVICES), dtype=np.uint8)
        self.chance = np.random.default_rng(1)
        self.step = 0

    def serve(self, steps, *, speed_D=None):
        """Returns how many replicas were loaded."""
        loads = 0
        for _ in range(steps):
            self.step += 1
            load_E = self.chance.multinomial(400, np.full(EXPERTS, 1 / EXPERTS)).astype(float)
            plan = self.planner.plan(
                PlanRequest(
                    step=self.step,
                    layer=0,
                    load_E=load_E,
                    previous_ED=self.replicas_ED,
                    alive_ED=self.replicas_ED,
                    capacity_D=np.array([6, 6, 6]),
                    speed_D=speed_D,
                )
            )
            loads += int(((plan.replicas_ED > 0) & (self.replicas_ED == 0)).sum())
            self.replicas_ED = plan.replicas_ED.copy()
            self.planner.observe(step=self.step, layer=0, load_E=load_E)
            if self.planner.search_due(0):
                self.planner.search(0)
        return loads

    def only_on(self, device):
        """Experts that nobody else has."""
        alone_E = self.replicas_ED.sum(axis=1) == 1
        return int((alone_E & (self.replicas_ED[:, device] > 0)).sum())


@pytest.mark.parametrize("factor", [None, 1.0, 1.5])
def test_experts_whose_only_replica_is_on_a_slow_device_move_and_may_come_back(factor):
    layer = Layer(memory_factor=factor)
    layer.serve(200)
    held, alone = int(layer.replicas_ED[:, 2].sum()), layer.only_on(2)
    assert held >= 2
    layer.serve(5, speed_D=SLOW)
    assert layer.replicas_ED[:, 2].sum() < held or layer.only_on(2) < alone
    assert layer.only_on(2) <= 1
    assert layer.replicas_ED.any(axis=1).all()
    layer.serve(100)
    assert layer.replicas_ED[:, 2].sum() >= held - 1


def test_a_slow_device_makes_the_layer_less_slow_when_it_is_heeded():
    times = {}
    slow = COST.slowed_by(SLOW)
    for heeds in (False, True):
        layer = Layer(memory_factor=1.0)
        layer.serve(100)
        layer.serve(20, speed_D=SLOW if heeds else None)
        tokens_ED = MinTimeSplitter(slow).split(
            np.full(EXPERTS, 50), layer.replicas_ED.astype(bool)
        )
        times[heeds] = slow.layer_s(tokens_ED)
    assert times[True] < 0.7 * times[False]


def test_a_slow_device_is_settled_for_at_once_and_only_once():
    layer = Layer(memory_factor=1.5)
    layer.serve(200)
    first = layer.serve(3, speed_D=SLOW)
    assert first > 0
    assert layer.serve(200, speed_D=SLOW) <= first


def test_a_set_does_not_stand_while_it_was_searched_for_other_speeds():
    layer = Layer(memory_factor=1.0)
    layer.serve(400)
    assert layer.planner.stands(0)
    request = PlanRequest(
        step=layer.step + 1,
        layer=0,
        load_E=np.full(EXPERTS, 50.0),
        previous_ED=layer.replicas_ED,
        alive_ED=layer.replicas_ED,
        capacity_D=np.array([6, 6, 6]),
        speed_D=SLOW,
    )
    layer.planner.plan(request)
    assert not layer.planner.stands(0)


def test_plans_with_equal_speeds_are_those_without_any():
    told, untold = Layer(), Layer()
    for _ in range(40):
        told.serve(5, speed_D=None)
        untold.serve(5)
        assert (told.replicas_ED == untold.replicas_ED).all()


@drawn(15)
@given(seed=st.integers(0, 2**16), speed=st.sampled_from([0.125, 0.25, 0.5]))
def test_every_expert_keeps_a_replica_whatever_the_speeds(seed, speed):
    chance, layer = np.random.default_rng(seed), Layer()
    layer.serve(20)
    for _ in range(10):
        speed_D = np.where(chance.random(DEVICES) < 0.3, speed, 1.0)
        layer.serve(4, speed_D=None if (speed_D == 1).all() else speed_D)
        assert layer.replicas_ED.any(axis=1).all()
        assert (layer.replicas_ED.sum(axis=0) <= 6).all()


def test_a_planner_for_even_splits_gives_a_slow_device_less():
    def load_of_slow(speed_D):
        plan = EvenSplitPlanner(1.0).plan(
            PlanRequest(
                step=1,
                layer=0,
                load_E=np.full(EXPERTS, 50.0),
                previous_ED=np.zeros((EXPERTS, DEVICES), dtype=np.uint8),
                alive_ED=np.zeros((EXPERTS, DEVICES), dtype=np.uint8),
                capacity_D=np.array([6, 6, 6]),
                speed_D=speed_D,
            )
        )
        return int(plan.replicas_ED[:, 2].sum())

    assert load_of_slow(SLOW) < load_of_slow(None)
