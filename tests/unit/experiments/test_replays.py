from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")  # recordings of the demo models are made with it

from moeless.workloads.routing_trace import write_trace
from moeless.workloads.synthetic import TraceSize, power_law
from moeless_experiments.context import Context
from moeless_experiments.figures.fig10 import derive
from moeless_experiments.figures.skew import crossing
from moeless_experiments.studies.replay_traces import StudyTrace, Workload
from moeless_experiments.studies.replay_variants import (
    JOINT,
    NO_HISTORY,
    NO_PLACER,
    NO_PREDICTOR,
    NO_SCALER,
    NO_SPLITTER,
)
from moeless_experiments.studies.replays import SYSTEMS, Case, replay_all, replay_case

LOAD = Workload("mixtral-8x7b", 1.2)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Forty steps of three skewed layers, and the loads before them."""
    size = TraceSize(num_layers=3, num_experts=8, top_k=2, steps=40, tokens=64)
    whole = power_law(size, 3, exponent=1.2)
    # The synthetic model has no known shape; Mixtral's name gives it one.
    whole = replace(whole, meta=replace(whole.meta, model="mixtral-8x7b"))
    path = tmp_path_factory.mktemp("study") / "trace.npz"
    write_trace(whole, path)
    return StudyTrace(
        path=path, trace=whole, history_LE=whole.loads_NLE.sum(axis=0).astype(np.float64)
    )


@pytest.fixture
def context(tmp_path, study):
    made = Context(out=tmp_path, cache=tmp_path / "cache", quick=True, threads=1)
    made.share(("study trace", LOAD), lambda: study)
    return made


def run(study, policy, **settings):
    return replay_case(Case(LOAD, policy, **settings), study, 0)


@pytest.mark.parametrize("policy", SYSTEMS)
def test_a_case_gives_the_same_figures_each_time(study, policy):
    first, second = run(study, policy), run(study, policy)
    assert first.figures == second.figures
    np.testing.assert_array_equal(first.layer_ms, second.layer_ms)
    assert not {"plan_us", "split_us", "search"} & set(first.figures)


def test_the_joint_ablation_of_the_paper_is_static_expert_parallelism(study):
    joint, static = run(study, "paper", without=JOINT), run(study, "static")
    np.testing.assert_array_equal(joint.layer_ms, static.layer_ms)


@pytest.mark.parametrize("policy", ["paper", "moeless"])
def test_without_its_scaler_a_policy_has_one_replica_for_each_expert(study, policy):
    assert run(study, policy, without=NO_SCALER).replicas == 8


@pytest.mark.parametrize("without", [NO_PREDICTOR, NO_PLACER, NO_SPLITTER])
@pytest.mark.parametrize("policy", ["paper", "moeless"])
def test_every_part_can_be_taken_away(study, policy, without):
    outcome = run(study, policy, without=without)
    assert outcome.straggler_ratio >= 1
    assert outcome.layer_ms.size == 36 * 3


def test_an_eplb_that_knows_what_came_before_balances_better_than_one_that_does_not(study):
    informed, new = run(study, "eplb"), run(study, "eplb", without=NO_HISTORY)
    assert informed.straggler_ratio < new.straggler_ratio


def test_a_replay_is_done_once_and_kept_for_the_next_run(context, study, monkeypatch):
    case = Case(LOAD, "static")
    first = replay_all(context, [case, case])[case]
    monkeypatch.setattr(
        "moeless_experiments.studies.replays.replay_case", lambda *_: pytest.fail("done again")
    )
    assert replay_all(context, [case])[case] is first
    later = Context(out=context.out, cache=context.cache, quick=True, threads=1)
    later.share(("study trace", LOAD), lambda: study)
    assert replay_all(later, [case])[case].figures == first.figures


def test_a_damaged_cache_is_made_again(context, study):
    case = Case(LOAD, "static")
    first = replay_all(context, [case])[case]
    (kept,) = (context.cache / "replays").iterdir()
    kept.write_bytes(b"not a zip file")
    later = Context(out=context.out, cache=context.cache, quick=True, threads=1)
    later.share(("study trace", LOAD), lambda: study)
    assert replay_all(later, [case])[case].figures == first.figures


def test_the_paper_s_percentages_imply_memories_by_cost_divided_by_time():
    implied = derive()
    assert implied["EPLB's memory ÷ Megatron-LM's"] == pytest.approx(2.06, abs=0.005)
    assert implied["MoEless's memory ÷ Megatron-LM's"] == pytest.approx(0.129, abs=0.0005)
    assert implied["Oracle's cost ÷ Megatron-LM's"] == pytest.approx(0.459, abs=0.0005)


def test_a_crossing_lies_between_points_and_may_not_exist():
    assert crossing([0, 1, 2], [0.0, -0.2, -0.6], -0.4) == pytest.approx(1.5)
    assert crossing([0, 1], [0.0, -0.2], -0.4) is None
