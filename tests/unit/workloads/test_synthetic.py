"""Synthetic traces."""

import numpy as np
import pytest

from moeless.errors import ConfigError
from moeless.workloads.eplb_cases import eplb_table_cases
from moeless.workloads.load_sampling import sample_loads
from moeless.workloads.synthetic import (
    FAMILIES,
    TraceSize,
    bursty,
    dirichlet_drift,
    make_synthetic,
    power_law,
)

SIZE = {"num_layers": 3, "num_experts": 8, "top_k": 2, "steps": 12, "tokens": 40}


def skew(trace):
    return float((trace.loads_NLE.max(axis=2) / trace.loads_NLE.mean(axis=2)).mean())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_that_it_is_synthetic(name):
    trace = make_synthetic(name, **SIZE, seed=1)
    assert len(trace) == 12
    assert trace.meta.unit == "steps"
    assert trace.meta.licence == "synthetic"
    assert trace.meta.source == f"synthetic {name}, seed 1"
    assert trace.meta.model == "synthetic"


def test_a_synthetic_trace_may_stand_in_for_a_model():
    trace = make_synthetic("uniform", **SIZE, seed=1, model="some/Model")
    assert trace.meta.model == "some/Model"
    assert trace.meta.licence == "synthetic"


def test_an_unknown_family_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'zipf'; known are: alternating, .*uniform"):
        make_synthetic("zipf", **SIZE, seed=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 9},
        {"top_k": 0},
        {"num_layers": 0},
        {"num_experts": 0},
        {"num_experts": 40_000},
        {"steps": 0},
        {"tokens": -1},
    ],
)
def test_a_wrong_size_is_named(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        make_synthetic("uniform", **{**SIZE, **changes}, seed=0)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="the seed is -1; use 0 or more"):
        make_synthetic("uniform", **SIZE, seed=-1)


def test_one_hot_sends_every_token_to_one_expert():
    trace = make_synthetic("one_hot", **SIZE, seed=3)
    assert (trace.loads_NLE.max(axis=2) == 40).all()
    hot = trace.loads_NLE.argmax(axis=2)
    assert (hot == hot[0]).all()
    others = np.sort(trace.loads_NLE, axis=2)[:, :, :-1]
    assert others.max() - others.min() <= 1


def test_the_hot_expert_of_alternating_is_never_the_same_twice():
    hot = make_synthetic("alternating", **SIZE, seed=3).loads_NLE.argmax(axis=2)
    assert (hot[1:] != hot[:-1]).all()


def test_a_steeper_power_law_is_more_skewed():
    size = TraceSize(**{**SIZE, "tokens": 2000})
    flat, published, steep = (power_law(size, 0, exponent=x) for x in (0.0, 1.2, 3.0))
    assert skew(flat) < 1.2 < skew(published) < skew(steep)


def test_layers_have_different_hot_experts():
    trace = make_synthetic("power_law", **{**SIZE, "num_layers": 16, "tokens": 500}, seed=0)
    assert len(np.unique(trace.loads_NLE.sum(axis=0).argmax(axis=1))) > 2


def test_drift_is_slow_where_it_should_be():
    size = TraceSize(**{**SIZE, "steps": 60, "tokens": 4000})

    def variation(trace):
        share = trace.loads_NLE / trace.loads_NLE.sum(axis=2, keepdims=True)
        return float(np.abs(np.diff(share, axis=0)).sum(axis=2).mean() / 2)

    slow, fast = (dirichlet_drift(size, 0, drift=drift) for drift in (0.02, 1.0))
    assert variation(slow) < 0.05
    assert variation(fast) > 0.2


def test_bursts_are_larger_than_quiet_steps():
    size = TraceSize(**{**SIZE, "steps": 300})
    assert set(bursty(size, 0).tokens_N.tolist()) == {40, 640}
    assert set(bursty(size, 0, start=0.0).tokens_N.tolist()) == {40}


def test_tiny_batches_are_tiny_and_sometimes_empty():
    tokens = make_synthetic("tiny_batches", **{**SIZE, "steps": 200}, seed=0).tokens_N
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 1, "top_k": 1},
        {"num_experts": 3, "top_k": 3},
        {"tokens": 0},
        {"steps": 1, "num_layers": 1},
    ],
)
def test_extreme_sizes_still_make_valid_traces(name, changes):
    make_synthetic(name, **{**SIZE, **changes}, seed=0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (power_law, {"exponent": -1}),
        (power_law, {"exponent": np.nan}),
        (dirichlet_drift, {"concentration": 0}),
        (dirichlet_drift, {"drift": 1.5}),
        (bursty, {"burst": 0}),
        (bursty, {"start": 2}),
    ],
)
def test_wrong_options_are_named(family, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        family(TraceSize(**SIZE), 0, **options)


def test_tokens_that_find_their_expert_full_go_where_there_is_room():
    popularity = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    loads = sample_loads(popularity, 10, 2, np.random.default_rng(0))
    assert loads.sum(axis=1).tolist() == [20, 20]
    assert loads[0, 0] == 10
    assert loads[1].tolist() == [10, 10, 0]


def test_the_eplb_cases_are_planner_inputs_and_traces():
    cases = eplb_table_cases()
    assert len({case.name for case in cases}) == len(cases) == 6
    for case in cases:
        assert case.slots >= len(case.loads)
        trace = case.as_trace(steps=3)
        assert len(trace) == 3
        np.testing.assert_array_equal(trace.loads_NLE[2, 0], case.load_E)
