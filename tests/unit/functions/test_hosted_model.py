"""Plans that do not follow loads follow what the devices may hold of the model."""

import numpy as np
import pytest

from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.supervisor.hosted_model import HostedModel

SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=(0,),
    num_experts=4,
    top_k=1,
    expert=ExpertShape(hidden=1, intermediate=1),
)


class Placement:
    def __init__(self):
        self.capacity = [2, 2]

    def capacity_D(self, layer):
        return np.array(self.capacity)


class Consumer:
    def __init__(self, *, adaptive):
        self.adaptive = adaptive
        self.starts = 0

    def start(self):
        self.starts += 1


@pytest.fixture
def model():
    request = {"directory": "d", "layout": "l"}
    made = HostedModel(SPEC, request, num_devices=2)
    made.placement, made.consumer = Placement(), Consumer(adaptive=False)
    yield made
    made.close()


def test_a_fixed_plan_is_made_again_once_for_each_change_of_what_it_may_have(model):
    model.plan()
    model.follow_capacity()
    assert model.consumer.starts == 1
    for expected, capacity in enumerate([[2, 1], [2, 2], [0, 4]], start=2):
        model.placement.capacity = capacity
        model.follow_capacity()
        model.follow_capacity()
        assert model.consumer.starts == expected


def test_a_plan_that_follows_loads_anyway_is_left_to_them(model):
    model.consumer.adaptive = True
    model.plan()
    model.placement.capacity = [1, 3]
    model.follow_capacity()
    assert model.consumer.starts == 1


def test_a_model_that_nobody_uses_is_not_planned(model):
    model.consumer = None
    model.plan()
    model.placement.capacity = [1, 3]
    model.follow_capacity()
