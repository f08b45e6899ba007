import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.plan import PlanRequest
from moeless.errors import ConfigError, PlanError
from moeless.policies.planners.even_split import EvenSplitPlanner
from moeless.workloads.eplb_cases import eplb_table_cases


def plan(load, capacity, *, factor=2.0, previous=None):
    load = np.asarray(load, dtype=float)
    nothing = np.zeros((len(load), len(capacity)), dtype=np.uint8)
    request = PlanRequest(
        step=0,
        layer=3,
        load_E=load,
        previous_ED=nothing if previous is None else previous,
        alive_ED=nothing,
        capacity_D=np.array(capacity, dtype=np.int64),
    )
    return EvenSplitPlanner(factor).plan(request).replicas_ED


def balancedness(load, replicas):
    load = np.asarray(load, dtype=float)
    tokens_D = (load / replicas.sum(axis=1, dtype=int)) @ replicas
    return tokens_D.mean() / tokens_D.max()


@pytest.mark.parametrize("case", eplb_table_cases(), ids=lambda case: case.name)
def test_known_loads_are_balanced_as_well_as_is_possible(case):
    if not any(case.loads):
        return
    capacity = [case.slots // case.devices] * case.devices
    replicas = plan(case.loads, capacity, factor=case.slots / len(case.loads))
    assert replicas.max() == 1
    assert balancedness(case.loads, replicas) >= case.reachable_balancedness - 5e-4


def test_no_load_makes_no_copies():
    assert plan([0] * 8, [2] * 8).sum() == 8


def test_replicas_that_gain_nothing_are_not_made():
    assert plan([10] * 8, [2] * 8).sum() == 8


def test_a_placement_in_force_that_is_perfect_is_kept():
    load = [40, 40, 10, 10]
    first = plan(load, [2, 2, 2, 2])
    assert balancedness(load, first) == 1.0
    assert (plan(load, [2, 2, 2, 2], previous=first) == first).all()


@drawn(50)
@given(
    st.lists(
        st.one_of(st.just(0), st.integers(0, 60), st.integers(0, 2**40)), min_size=1, max_size=14
    ),
    st.lists(st.integers(0, 14), min_size=1, max_size=6),
    st.floats(1.0, 3.0),
)
def test_every_expert_has_a_seat_and_no_device_too_many(load, capacity, factor):
    capacity = [min(len(load), slots) for slots in capacity]
    if sum(capacity) < len(load):
        with pytest.raises(PlanError, match="need at least"):
            plan(load, capacity, factor=factor)
        return
    replicas = plan(load, capacity, factor=factor)
    assert replicas.max() == 1
    assert replicas.any(axis=1).all()
    assert (replicas.sum(axis=0) <= capacity).all()
    assert replicas.sum() <= max(len(load), int(factor * len(load) + 1e-9))
    assert (plan(load, capacity, factor=factor) == replicas).all()


def test_a_factor_below_one_is_refused():
    with pytest.raises(ConfigError, match="planner even_split: memory_factor"):
        EvenSplitPlanner(0.9)
