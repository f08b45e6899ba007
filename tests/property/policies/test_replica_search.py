"""What a search promises, the splitter's own judgement confirms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.layer_cost import LayerCost
from moeless.policies.kernels.replica_search import best_change
from moeless.policies.kernels.set_judge import (
    TAIL_WEIGHT,
    penalty_near,
    set_penalty,
    split_loads,
)
from moeless.policies.planners.topology import random_topology


@st.composite
def problems(draw):
    """Loads [N, E], a set [E, D] and prices [3, D]."""
    experts = draw(st.integers(2, 9))
    devices = draw(st.integers(2, 5))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    load_NE = rng.integers(0, draw(st.sampled_from([3, 40, 2000])), size=(20, experts))
    slots = -(-experts // devices) + draw(st.integers(0, 2))
    replicas = draw(st.integers(experts, slots * devices))
    replicas_ED = random_topology(experts, [slots] * devices, replicas, rng)
    speeds = draw(st.sampled_from([(), (1.0, 0.5, 1.0, 2.0, 0.7)]))[:devices]
    touch_s = draw(st.sampled_from([0.0, 3.0, 100.0]))
    cost = LayerCost(base_s=20.0, touch_s=touch_s, token_s=1.0, transfer_s=0.1, speeds=speeds)
    return load_NE.astype(np.int64), replicas_ED, slots, cost.price_XD(devices)


def judge(load_NE, replicas_ED, price_XD):
    weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
    return set_penalty(load_NE, weight_N, replicas_ED, price_XD, TAIL_WEIGHT, np.inf)


@given(problem=problems(), price=st.sampled_from([0.0, 0.005, 0.05]))
@drawn(60)
def test_a_change_lowers_the_penalty_by_what_was_promised(problem, price):
    load_NE, replicas_ED, slots, price_XD = problem
    weight_N = np.full(len(load_NE), 1.0 / len(load_NE))
    change = np.empty((2, 4), dtype=np.int64)
    capacity_D = np.full(replicas_ED.shape[1], slots, dtype=np.int64)
    most = int(replicas_ED.sum()) + 1
    before_ED = replicas_ED.copy()
    gain = best_change(
        load_NE, weight_N, replicas_ED, price_XD, price, capacity_D, most, 24, 10, 48, change
    )
    assert (replicas_ED == before_ED).all()
    rows = [row for row in change.tolist() if row[2] >= 0]
    assert bool(rows) == (gain > 0.0)
    for e0, d0, _, _ in rows:
        if e0 >= 0:
            assert replicas_ED[e0, d0] == 1
            replicas_ED[e0, d0] = 0
    for _, _, e1, d1 in rows:
        assert replicas_ED[e1, d1] == 0
        replicas_ED[e1, d1] = 1
    assert (replicas_ED.sum(axis=0) <= slots).all()
    assert replicas_ED.sum() <= most
    fall = judge(load_NE, before_ED, price_XD) - judge(load_NE, replicas_ED, price_XD)
    assert fall == pytest.approx(gain + price * len(rows), abs=1e-9)


@given(problem=problems())
@drawn(60)
def test_a_set_near_itself_is_worth_what_it_is(problem):
    load_NE, replicas_ED, _, price_XD = problem
    if not price_XD[1].any():
        return  # exact splits need no estimate
    loads = len(load_NE)
    weight_N = np.full(loads, 1.0 / loads)
    known_NED = np.empty((loads, *replicas_ED.shape), dtype=np.int64)
    excess_N, bound_N = np.empty(loads), np.empty(loads)
    base = split_loads(
        load_NE,
        replicas_ED,
        price_XD,
        known_NED,
        excess_N,
        bound_N,
        TAIL_WEIGHT,
        np.inf,
        weight_N,
    )
    assert (known_NED.sum(axis=2) == load_NE).all()
    nothing = np.full((2, 4), -1)
    near = penalty_near(
        load_NE,
        weight_N,
        replicas_ED,
        price_XD,
        known_NED,
        excess_N,
        bound_N,
        nothing,
        0,
        np.inf,
        TAIL_WEIGHT,
        np.inf,
    )
    assert near == pytest.approx(base, abs=1e-9)
