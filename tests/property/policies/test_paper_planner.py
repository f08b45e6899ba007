import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.core.plan import PlanRequest
from moeless.errors import PlanError
from moeless.policies.planners.paper import PaperPlanner
from moeless.policies.planners.paper_scaler import scale_replicas
from moeless.policies.planners.static import StaticPlanner


@st.composite
def requests(draw):
    experts, devices = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    load = draw(
        st.lists(
            st.one_of(st.just(0.0), st.floats(0, 2.0**53), st.integers(0, 50).map(float)),
            min_size=experts,
            max_size=experts,
        )
    )
    flags = st.lists(
        st.integers(0, 1), min_size=experts * devices, max_size=experts * devices
    ).map(lambda cells: np.array(cells, dtype=np.uint8).reshape(experts, devices))
    capacity = draw(st.lists(st.integers(0, experts + 2), min_size=devices, max_size=devices))
    return PlanRequest(
        step=0,
        layer=0,
        load_E=np.array(load),
        previous_ED=draw(flags),
        alive_ED=draw(flags),
        capacity_D=np.array(capacity, dtype=np.int64),
    )


def feasible(request):
    return np.minimum(request.capacity_D, request.num_experts).sum() >= request.num_experts


@given(requests(), st.floats(0, 2), st.floats(1, 4))
def test_a_plan_exists_exactly_when_every_expert_fits(request, threshold, factor):
    planner = PaperPlanner(cv_threshold=threshold, memory_factor=factor)
    if not feasible(request):
        with pytest.raises(PlanError, match="experts need at least"):
            planner.plan(request)
        return
    replicas = planner.plan(request).replicas_ED
    assert set(np.unique(replicas)) <= {0, 1}
    assert (replicas.sum(axis=1) >= 1).all()
    assert (replicas.sum(axis=0) <= request.capacity_D).all()
    assert replicas.sum() <= factor * request.num_experts + 1e-6


@given(requests())
def test_equal_requests_give_equal_plans(request):
    if feasible(request):
        first, second = PaperPlanner().plan(request), PaperPlanner().plan(request)
        assert (first.replicas_ED == second.replicas_ED).all()


@given(requests())
def test_a_static_plan_has_one_replica_per_expert_or_says_why_not(request):
    try:
        replicas = StaticPlanner().plan(request).replicas_ED
    except PlanError:
        usable = int((request.capacity_D > 0).sum())
        share = -(-request.num_experts // usable) if usable else 1
        assert not feasible(request) or request.capacity_D[request.capacity_D > 0].min() < share
        return
    assert (replicas.sum(axis=1) == 1).all()
    assert (replicas.sum(axis=0) <= request.capacity_D).all()


@given(st.permutations(range(4)), st.permutations([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]))
def test_renumbering_equal_devices_renumbers_the_plan(order, load):
    # Powers of two: no two sums of distinct loads are equal, so that no ties arise once every
    # device has a warm expert to start from.
    warm = np.zeros((7, 4), dtype=np.uint8)
    warm[np.argsort(load)[-4:], range(4)] = 1

    def plan(alive):
        return PaperPlanner(memory_factor=1.0).plan(
            PlanRequest(
                step=0,
                layer=0,
                load_E=np.array(load),
                previous_ED=np.zeros((7, 4), dtype=np.uint8),
                alive_ED=alive,
                capacity_D=np.full(4, 7, dtype=np.int64),
            )
        )

    assert (plan(warm[:, order]).replicas_ED == plan(warm).replicas_ED[:, order]).all()


def coefficient_of_variation(loads, counts):
    shares = np.repeat(np.array(loads) / counts, counts)
    return shares.std() / shares.mean()


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda loads: sum(loads) > 1e-3),
    st.floats(0, 1.5),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_scaling_stops_only_when_balanced_or_capped(loads, threshold, extra, per_expert):
    cap = len(loads) + extra
    counts = scale_replicas(
        loads, cv_threshold=threshold, max_replicas=cap, max_per_expert=per_expert
    )
    assert min(counts) >= 1
    assert max(counts) <= per_expert
    assert sum(counts) <= cap
    balanced = coefficient_of_variation(loads, counts) <= threshold + 1e-5
    exhausted = all(c == per_expert for c, load in zip(counts, loads, strict=True) if load > 0)
    assert balanced or sum(counts) == cap or exhausted


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(lambda loads: sum(loads) > 1e-3),
    st.floats(0, 1.5),
    st.integers(1, 9),
)
def test_scaling_follows_a_literal_reading_of_algorithm_1(loads, threshold, per_expert):
    cap = 2 * len(loads)
    counts = [1] * len(loads)
    margin = 1.0
    while sum(counts) < cap:
        cv = coefficient_of_variation(loads, counts)
        margin = min(margin, abs(cv - max(threshold, 1e-6)))
        shares = [
            load / count if count < per_expert and load > 0 else -1.0
            for load, count in zip(loads, counts, strict=True)
        ]
        if cv <= max(threshold, 1e-6) or max(shares) < 0:
            break
        counts[shares.index(max(shares))] += 1
    fast = scale_replicas(
        loads, cv_threshold=threshold, max_replicas=cap, max_per_expert=per_expert
    )
    # Within rounding of the threshold either reading is right.
    assert fast == counts or margin < 1e-5
