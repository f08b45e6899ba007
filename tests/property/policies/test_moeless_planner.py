import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.layer_cost import LayerCost
from moeless.core.plan import PlanRequest
from moeless.policies.planners.moeless import MoelessPlanner
from moeless.policies.planners.topology import carry_over, first_topology
from moeless.policies.splitters.min_time import MinTimeSplitter


@st.composite
def layers(draw):
    experts, devices = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    slots = st.integers(0, experts)
    capacity = draw(st.lists(slots, min_size=devices, max_size=devices))
    short = experts - sum(capacity)
    if short > 0:
        capacity[0] = min(experts, capacity[0] + short)
        capacity[-1] += max(0, experts - sum(capacity))
    return experts, [min(experts, c) for c in capacity]


def fits(experts, capacity):
    return sum(capacity) >= experts


def make_request(load, capacity, step=0):
    nothing = np.zeros((len(load), len(capacity)), dtype=np.uint8)
    return PlanRequest(
        step=step,
        layer=0,
        load_E=np.asarray(load, dtype=float),
        previous_ED=nothing,
        alive_ED=nothing,
        capacity_D=np.array(capacity, dtype=np.int64),
    )


loads = st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 2**40))


def check(replicas, capacity, most):
    assert set(np.unique(replicas)) <= {0, 1}
    assert replicas.any(axis=1).all()
    assert (replicas.sum(axis=0) <= capacity).all()
    assert replicas.sum() <= most


@given(layers(), st.floats(1.0, 3.0))
def test_the_first_topology_seats_everybody_within_the_capacities(layer, factor):
    experts, capacity = layer
    if fits(experts, capacity):
        most = max(experts, int(factor * experts))
        check(first_topology(experts, capacity, most), capacity, most)


@drawn(60)
@given(layers(), st.data(), st.sampled_from([1.0, 1.25, 1.5, 2.0, None]), st.booleans())
def test_no_sequence_of_loads_breaks_a_plan(layer, data, factor, touching):
    experts, capacity = layer
    if not fits(experts, capacity):
        return
    cost = LayerCost(touch_s=1e-4 if touching else 0.0, token_s=1e-6)
    planner, twin = (MoelessPlanner(cost, memory_factor=factor, interval=1) for _ in range(2))
    most = max(experts, int((factor or 2.0) * experts + 1e-9))
    splitter = MinTimeSplitter(cost)
    row = st.lists(loads, min_size=experts, max_size=experts)
    drawn = [np.array(data.draw(row), dtype=np.int64) for _ in range(6)]
    for step in range(data.draw(st.integers(1, 40))):
        load = np.roll(drawn[step % 6], step // 6)
        plan = planner.plan(make_request(load, capacity, step))
        check(plan.replicas_ED, capacity, most)
        assert (
            twin.plan(make_request(load, capacity, step)).replicas_ED == plan.replicas_ED
        ).all()
        assert (splitter.split(load, plan.replicas_ED.astype(bool)).sum(axis=1) == load).all()
        for one in (planner, twin):
            one.observe(step=step, layer=0, load_E=load.astype(float))
            if one.search_due(0):
                one.search(0)


@drawn(40)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 3), st.data())
def test_one_more_slot_per_device_never_worsens_the_bound(experts, devices, slots, data):
    load = np.array(
        data.draw(st.lists(st.integers(0, 5000), min_size=experts, max_size=experts)),
        dtype=np.int64,
    )
    cost = LayerCost(touch_s=1e-4, token_s=1e-6)
    assert cost.bound_s(load, devices + 1) <= cost.bound_s(load, devices) + 1e-15
    if experts > devices * slots or not load.any():
        return
    for more in (slots, slots + 1):
        capacity = [min(experts, more)] * devices
        factor = max(1.0, sum(capacity) / experts)
        replicas = (
            MoelessPlanner(memory_factor=factor).plan(make_request(load, capacity)).replicas_ED
        )
        share = MinTimeSplitter().split(load, replicas.astype(bool))
        assert share.sum(axis=0).max() >= -(-load.sum() // devices)


@given(layers(), st.floats(1.0, 3.0), st.randoms(use_true_random=False))
def test_a_set_carried_over_to_other_capacities_is_whole(before, factor, random):
    experts, capacity = before
    if not fits(experts, capacity):
        return
    previous = first_topology(experts, capacity, max(experts, int(factor * experts)))
    devices = len(capacity)
    now = [random.randint(0, experts) for _ in range(devices)]
    if sum(now) < experts:
        return
    most = max(experts, int(factor * experts))
    check(carry_over(previous, now, most), now, most)
