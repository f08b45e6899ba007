import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.plan import PlanRequest
from moeless.errors import PlanError
from moeless.policies.planners.eplb import EplbPlanner
from moeless.policies.planners.eplb_rebalance import rebalance_experts
from moeless.policies.planners.eplb_slots import expected_load_D
from moeless.policies.planners.swift import SwiftPlanner
from moeless.policies.splitters.even import EvenSplitter
from moeless.policies.splitters.slots import SlotSplitter

LOADS = st.one_of(st.just(0.0), st.floats(0, 2.0**53), st.integers(0, 50).map(float))


@st.composite
def requests(draw):
    experts, devices = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    cells = st.lists(st.integers(0, 3), min_size=experts * devices, max_size=experts * devices)
    capacity = draw(st.lists(st.integers(0, experts + 2), min_size=devices, max_size=devices))
    previous = np.array(draw(cells), dtype=np.uint8).reshape(experts, devices)
    return PlanRequest(
        step=0,
        layer=0,
        load_E=np.array(draw(st.lists(LOADS, min_size=experts, max_size=experts))),
        previous_ED=previous,
        alive_ED=np.minimum(previous, 1),
        capacity_D=np.array(capacity, dtype=np.int64),
    )


@pytest.mark.parametrize("planner_class", [EplbPlanner, SwiftPlanner])
@given(request=requests(), factor=st.floats(1, 4))
def test_a_plan_exists_exactly_when_equal_slots_hold_every_expert(planner_class, request, factor):
    capacity = np.minimum(request.capacity_D, request.num_experts)
    usable = capacity[capacity > 0]
    planner = planner_class(memory_factor=factor)
    if not usable.size or usable.min() * usable.size < request.num_experts:
        with pytest.raises(PlanError, match="raise"):
            planner.plan(request)
        return
    plan, again = planner.plan(request), planner.plan(request)
    replicas = plan.replicas_ED
    assert (replicas == again.replicas_ED).all()
    assert replicas.dtype == np.uint8
    assert replicas.max() <= (1 if planner_class is SwiftPlanner else request.capacity_D.max())
    assert (replicas.sum(axis=1) >= 1).all()
    assert (replicas.sum(axis=0) <= request.capacity_D).all()


@st.composite
def standing_plans(draw):
    """Loads, and a placement that fills its slots without repeating an expert on a device."""
    experts, devices = draw(st.integers(2, 10)), draw(st.integers(2, 5))
    per_device = draw(st.integers(-(-experts // devices), experts))
    slots = np.arange(per_device * devices) % experts
    order = np.array(draw(st.permutations(range(experts))))
    seats = np.zeros((experts, devices), dtype=np.uint8)
    seats[order[slots], np.repeat(np.arange(devices), per_device)] = 1
    load = np.array(draw(st.lists(LOADS, min_size=experts, max_size=experts)))
    return load, seats


@given(standing_plans(), st.floats(0, 0.5), st.integers(0, 4))
@drawn(200)
def test_swift_changes_few_slots_and_only_for_a_gain(standing, threshold, max_swaps):
    load, seats = standing
    experts, devices = seats.shape
    planner = SwiftPlanner(
        memory_factor=seats.sum() / experts, threshold=threshold, max_swaps=max_swaps
    )
    plan = planner.plan(
        PlanRequest(
            step=1,
            layer=0,
            load_E=load,
            previous_ED=seats,
            alive_ED=seats,
            capacity_D=np.full(devices, experts, dtype=np.int64),
        )
    )
    loaded = int(((plan.replicas_ED > 0) & (seats == 0)).sum())
    assert loaded <= 2 * max_swaps
    assert (plan.replicas_ED.sum(axis=0) == seats.sum(axis=0)).all()
    if loaded:
        before = expected_load_D(load, seats).max()
        assert expected_load_D(load, plan.replicas_ED).max() <= (1 - threshold) * before


@st.composite
def clusters(draw):
    nodes, groups_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    group_size, devices = draw(st.integers(1, 4)), nodes * draw(st.integers(1, 3))
    groups = nodes * groups_per_node
    experts = groups * group_size
    slots = devices * (-(-experts // devices) + draw(st.integers(0, 3)))
    loads = st.lists(LOADS, min_size=experts, max_size=experts)
    load = np.array(draw(st.lists(loads, min_size=1, max_size=3)))
    return load, {
        "num_slots": slots,
        "num_devices": devices,
        "num_groups": groups,
        "num_nodes": nodes,
    }


@given(clusters())
def test_eplb_fills_every_slot_and_leaves_no_expert_out(cluster):
    load, options = cluster
    experts = load.shape[1]
    slots = rebalance_experts(load, **options)
    assert slots.shape == (len(load), options["num_slots"])
    for row in slots:
        assert (np.bincount(row, minlength=experts) >= 1).all()
    assert (rebalance_experts(load[0], **options) == slots[0]).all()


@given(clusters())
def test_eplb_keeps_every_group_on_one_node(cluster):
    load, options = cluster
    nodes, groups = options["num_nodes"], options["num_groups"]
    slots = rebalance_experts(load, **options).reshape(len(load), nodes, -1)
    groups_LNR = slots // (load.shape[1] // groups)
    for nodes_of_layer in groups_LNR:
        sets = [set(row.tolist()) for row in nodes_of_layer]
        assert sum(len(s) for s in sets) == len(set().union(*sets)) == groups


@st.composite
def counts_and_slots(draw):
    experts, devices = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cells = st.lists(st.integers(0, 3), min_size=experts * devices, max_size=experts * devices)
    copies = np.array(draw(cells)).reshape(experts, devices)
    counts = draw(st.lists(st.integers(0, 200), min_size=experts, max_size=experts))
    return np.where(copies.any(axis=1), counts, 0), copies


@given(counts_and_slots())
def test_the_slot_splitter_serves_every_token_once_in_equal_shares(case):
    count, copies = case
    share = SlotSplitter().split(count, copies)
    assert (share.sum(axis=1) == count).all()
    whole = count // np.maximum(copies.sum(axis=1), 1)
    assert (share >= whole[:, None] * copies).all()
    assert (share <= (whole[:, None] + 1) * copies).all()


@given(counts_and_slots())
def test_with_one_slot_per_replica_the_slot_splitter_is_the_even_one(case):
    count, copies = case
    usable = copies > 0
    assert (SlotSplitter().split(count, usable) == EvenSplitter().split(count, usable)).all()
