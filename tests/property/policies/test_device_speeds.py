"""Devices of unequal speed: the splitter minimises time, not tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.core.layer_cost import LayerCost, fill_level
from moeless.core.plan import PlanRequest
from moeless.policies.planners.even_split import EvenSplitPlanner
from moeless.policies.planners.moeless import MoelessPlanner
from moeless.policies.splitters.min_time import MinTimeSplitter
from moeless.simulator.optimum import least_time


@st.composite
def cases(draw, most_tokens=2**40):
    """Tokens [E], usable replicas [E, D] and speeds [D]."""
    experts, devices = draw(st.integers(1, 10)), draw(st.integers(1, 6))
    counts = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, most_tokens))
    count_E = np.array(draw(st.lists(counts, min_size=experts, max_size=experts)), dtype=np.int64)
    cells = draw(st.lists(st.booleans(), min_size=experts * devices, max_size=experts * devices))
    usable_ED = np.array(cells, dtype=bool).reshape(experts, devices)
    usable_ED[(count_E > 0) & ~usable_ED.any(axis=1), draw(st.integers(0, devices - 1))] = True
    speed = st.sampled_from([0.25, 0.5, 0.7, 1.0, 1.3, 3.0])
    speeds = draw(st.lists(speed, min_size=devices, max_size=devices))
    return count_E, usable_ED, tuple(speeds)


@given(cases(), st.sampled_from([0.0, 72e-6]), st.sampled_from([0.0, 65e-6]))
def test_every_token_is_given_to_exactly_one_usable_replica(case, touch_s, base_s):
    count_E, usable_ED, speeds = case
    cost = LayerCost(base_s=base_s, touch_s=touch_s, token_s=0.6e-6, speeds=speeds)
    share_ED = MinTimeSplitter(cost).split(count_E, usable_ED)
    assert (share_ED >= 0).all()
    assert (share_ED.sum(axis=1) == count_E).all()
    assert (share_ED[~usable_ED] == 0).all()


@given(cases(most_tokens=5000), st.sampled_from([0.0, 40.0]))
@drawn(60)
def test_where_touching_is_free_the_time_is_the_optimum_to_the_token(case, base_s):
    count_E, usable_ED, speeds = case
    cost = LayerCost(base_s=base_s, token_s=1.0, speeds=speeds)
    share_ED = MinTimeSplitter(cost).split(count_E, usable_ED)
    best_s = least_time(count_E, usable_ED, cost, limit_s=10.0)
    if best_s is None:
        return
    assert cost.layer_s(share_ED) <= best_s * (1 + 1.1e-3) + 1e-9  # the program's own gap


def test_where_touching_costs_small_cases_are_within_two_percent_of_the_optimum():
    random = np.random.default_rng(5)
    ratios = []
    for _ in range(60):
        devices, experts = int(random.integers(2, 5)), int(random.integers(2, 8))
        usable_ED = random.random((experts, devices)) < random.uniform(0.2, 0.9)
        usable_ED[~usable_ED.any(axis=1), 0] = True
        tokens = int(10 ** random.uniform(0.5, 4))
        count_E = random.multinomial(tokens, random.dirichlet(np.full(experts, 1.0)))
        cost = LayerCost(
            base_s=float(random.choice([0, 100])),
            touch_s=float(random.choice([10, 113, 500])),
            token_s=1.0,
            speeds=tuple(random.choice([0.5, 0.8, 1.0, 2.0], size=devices).tolist()),
        )
        best_s = least_time(count_E, usable_ED, cost, limit_s=10.0)
        if best_s is None:
            continue
        share_ED = MinTimeSplitter(cost).split(count_E.astype(np.int64), usable_ED)
        assert cost.bound_s(count_E, devices) <= best_s * (1 + 1e-6)
        ratios.append(cost.layer_s(share_ED) / best_s)
    assert len(ratios) > 50
    assert max(ratios) <= 1.02


@given(cases(), st.sampled_from([0.0, 72e-6]))
def test_speeds_of_one_give_what_no_speeds_give(case, touch_s):
    count_E, usable_ED, _ = case
    devices = usable_ED.shape[1]
    plain = LayerCost(touch_s=touch_s, token_s=0.6e-6)
    named = LayerCost(touch_s=touch_s, token_s=0.6e-6, speeds=(1.0,) * devices)
    assert named == plain
    there_ED = MinTimeSplitter(plain).split(count_E, usable_ED)
    assert (MinTimeSplitter(named).split(count_E, usable_ED) == there_ED).all()


@given(cases(most_tokens=5000), st.sampled_from([0.0, 72e-6]))
def test_devices_that_are_all_half_as_fast_take_twice_as_long(case, touch_s):
    count_E, usable_ED, _ = case
    devices = usable_ED.shape[1]
    plain = LayerCost(touch_s=touch_s, token_s=0.6e-6)
    slow = LayerCost(touch_s=touch_s, token_s=0.6e-6, speeds=(0.5,) * devices)
    there_ED = MinTimeSplitter(plain).split(count_E, usable_ED)
    here_ED = MinTimeSplitter(slow).split(count_E, usable_ED)
    assert slow.layer_s(here_ED) == pytest.approx(2 * plain.layer_s(there_ED), rel=1e-9)


def test_the_fill_level_is_where_the_amounts_of_all_devices_add_up():
    price_D, offset_D = np.array([1.0, 2.0, 0.5]), np.array([0.0, 10.0, 3.0])
    for amount in (0.5, 2.9, 20.0, 1000.0):
        level = fill_level(np.array([amount]), price_D, offset_D)[0]
        assert (np.maximum(0.0, level - offset_D) / price_D).sum() == pytest.approx(amount)


@pytest.mark.parametrize("touch_s", [0.0, 20.0])
def test_the_default_planner_gives_fast_devices_more(touch_s):
    experts, speeds = 16, (1.0, 1.0, 0.25, 0.25)
    cost = LayerCost(touch_s=touch_s, token_s=1.0, speeds=speeds)
    blind = LayerCost(touch_s=touch_s, token_s=1.0)
    loads_NE = np.random.default_rng(0).multinomial(4000, np.full(experts, 1 / 16), size=60)
    times = []
    for known in (cost, blind):
        planner = MoelessPlanner(known, memory_factor=1.25)
        held_ED = np.zeros((experts, 4), dtype=np.uint8)
        for step, load_E in enumerate(loads_NE.astype(np.float64)):
            held_ED = planner.plan(request(step, load_E, held_ED)).replicas_ED
            planner.observe(step=step, layer=0, load_E=load_E)
            if planner.search_due(0):
                planner.search(0)
        share_ED = MinTimeSplitter(cost).split(loads_NE[-1], held_ED > 0)
        times.append(cost.layer_s(share_ED) / cost.bound_s(loads_NE[-1], 4))
    assert times[0] < 1.1
    assert times[0] <= times[1]


def test_the_planner_of_even_splits_gives_fast_devices_more():
    speeds = (1.0, 1.0, 0.25, 0.25)
    load_E = np.full(16, 100.0)
    cost = LayerCost(token_s=1.0, speeds=speeds)
    planner = EvenSplitPlanner(1.25, cost=cost)
    held_ED = planner.plan(request(0, load_E, np.zeros((16, 4), dtype=np.uint8))).replicas_ED
    tokens_D = (load_E / held_ED.sum(axis=1)) @ held_ED
    assert (tokens_D / np.array(speeds)).max() <= 1.1 * load_E.sum() / sum(speeds)


def request(step, load_E, held_ED):
    experts, devices = held_ED.shape
    return PlanRequest(
        step=step,
        layer=0,
        load_E=load_E,
        previous_ED=held_ED,
        alive_ED=held_ED,
        capacity_D=np.full(devices, experts, dtype=np.int64),
    )
