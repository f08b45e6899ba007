"""Real workers under a real supervisor, and the simulator, decide the same on one trace.

The simulator is told in which order the supervisor heard of things, and what the token path saw
when it looked, so that the machine's other work decides nothing here. Everything else it has to
find out itself: which replicas there are to be, what is loaded and evicted and in which order,
who makes room for whom, which experts tokens wait for, and how they are divided.
"""

from dataclasses import replace

import numpy as np
import pytest

from fakes.process_runs import run_workers, simulate
from fakes.replays import make_trace
from families import make_tiny
from moeless.core.events import (
    DemandTaken,
    InstanceEvicted,
    InstanceLoaded,
    LoadTaken,
    PlanFailed,
    PlanMade,
    ReplicasChanged,
    SearchTaken,
)
from moeless.errors import TraceError
from moeless.simulator.forecasts import NoisyForecast

pytestmark = pytest.mark.slow

STEPS, LAYERS, EXPERTS, TOP_K = 48, 3, 8, 2
ROOMY = LAYERS * EXPERTS
"""Instances for which each device has room: of all experts."""
TIGHT = 10
"""Two layers and a half on both devices together: each step, some make room for others."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    make_tiny("mixtral", num_hidden_layers=LAYERS).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def ids():
    """Chosen experts of every step and layer [T, K]: skewed, drifting, and seldom as many."""
    rng = np.random.default_rng(5)
    weight_LE = rng.gamma(0.7, size=(LAYERS, EXPERTS)) + 0.05
    steps = []
    for step in range(STEPS):
        weight_LE = weight_LE * np.exp(0.3 * rng.standard_normal(weight_LE.shape))
        rows = 20 + (step * 7) % 45
        score = np.log(weight_LE)[:, None] + rng.gumbel(size=(LAYERS, rows, EXPERTS))
        steps.append(np.argsort(-score, axis=2)[:, :, :TOP_K])
    return steps


@pytest.fixture(scope="module")
def trace(ids):
    return make_trace(
        [[np.bincount(layer.ravel(), minlength=EXPERTS) for layer in step] for step in ids],
        top_k=TOP_K,
        model="checkpoint",
    )


@pytest.fixture(scope="module")
def forecast(trace):
    return NoisyForecast(trace.loads_NLE, sigma=0.2, seed=1)


@pytest.fixture(scope="module")
def run_of(checkpoint, ids, forecast, tmp_path_factory):
    """A run by policy and room; each is made once."""
    made = {}

    def run_of(name, slots):
        if (name, slots) not in made:
            path = tmp_path_factory.mktemp("run") / "events.jsonl"
            made[name, slots] = run_workers(checkpoint, name, slots, ids, forecast, path)
        return made[name, slots]

    return run_of


def changes(plans):
    """Only the plans that differ from the layer's plan before."""
    known, changed = {}, []
    for _, layer, devices_E in plans:
        if known.get(layer) != devices_E:
            known[layer] = devices_E
            changed.append((layer, devices_E))
    return changed


@pytest.mark.parametrize(
    ("name", "slots"), [("paper", TIGHT), ("moeless", TIGHT), ("moeless", ROOMY)]
)
def test_the_simulator_decides_as_real_workers_did_when_told_their_times(
    name, slots, run_of, trace, forecast
):
    run = run_of(name, slots)
    # Loads and evictions that it would not have ordered, or in another order, raise.
    plans, shares = simulate(trace, forecast, run)

    made = [(event.step, event.layer) for event in run.of(PlanMade)]
    assert made == [(step, layer) for step, layer, _ in plans]
    changed = [(event.layer, event.devices_E) for event in run.of(ReplicasChanged)]
    assert changed == changes(plans)
    assert len(shares) == len(run.shares) >= STEPS * LAYERS
    for ours_ED, theirs_ED in zip(run.shares, shares, strict=True):
        np.testing.assert_array_equal(ours_ED, theirs_ED)
    # It was worth looking at: plans changed while the run went on, and replicas came with them.
    assert len(changed) > LAYERS
    assert len(run.of(InstanceLoaded)) > LAYERS * EXPERTS
    assert not run.of(PlanFailed)
    if slots == TIGHT:
        assert sum(event.reason == "room" for event in run.of(InstanceEvicted)) > STEPS
        assert run.of(DemandTaken)
    if name == "moeless":
        assert run.of(SearchTaken)


def first(run, kind):
    """The place of a kind's first event in a run."""
    return next(place for place, event in enumerate(run.events) if isinstance(event, kind))


def quiet_look(run):
    """A layer-step in which nothing changed that it could use, and what that was."""
    for step in range(STEPS // 2, STEPS - 1):
        found = [run.looks[s, 0].looks[0].usable_ED for s in (step - 1, step, step + 1)]
        if all((usable_ED == found[0]).all() for usable_ED in found):
            return (step, 0), found[0]
    raise AssertionError("replicas of layer 0 changed all the time")


def with_event(run, place, **fields):
    """The run, if one of its events had been another."""
    events = list(run.events)
    events[place] = replace(events[place], **fields)
    return replace(run, events=events)


def with_look(run, where, number, **fields):
    """The run, if one of its looks had found something else."""
    seen = run.looks[where]
    looks = list(seen.looks)
    looks[number] = replace(looks[number], **fields)
    return replace(run, looks=run.looks | {where: replace(seen, looks=looks)})


def test_a_run_that_gave_up_another_replica_is_not_repeated(run_of, trace, forecast):
    run = run_of("paper", TIGHT)
    place = first(run, InstanceEvicted)
    other = (run.events[place].expert + 1) % EXPERTS
    with pytest.raises(TraceError, match=r"the run's next order was to evict .*, the replay's"):
        simulate(trace, forecast, with_event(run, place, expert=other))


def test_a_run_that_evicted_for_another_reason_is_not_repeated(run_of, trace, forecast):
    run = run_of("paper", TIGHT)
    place = first(run, InstanceEvicted)
    with pytest.raises(TraceError, match=r"\(released\), the replay's was to evict .*\(room\)"):
        simulate(trace, forecast, with_event(run, place, reason="released"))


def test_a_run_whose_tokens_waited_for_another_expert_is_not_repeated(run_of, trace, forecast):
    run = run_of("paper", TIGHT)
    place = first(run, DemandTaken)
    other = ((run.events[place].experts[0] + 1) % EXPERTS,)
    with pytest.raises(TraceError, match="the run demanded experts"):
        simulate(trace, forecast, with_event(run, place, experts=other))


def test_a_run_that_saw_other_replicas_is_not_repeated(run_of, trace, forecast):
    run = run_of("moeless", ROOMY)
    where, usable_ED = quiet_look(run)
    expert = int(np.flatnonzero(usable_ED.sum(axis=1) == 1)[0])
    other_ED = usable_ED.copy()
    other_ED[expert] = ~usable_ED[expert]
    with pytest.raises(TraceError, match=rf"the run (found|did not find) .* expert {expert} on"):
        simulate(trace, forecast, with_look(run, where, 0, usable_ED=other_ED))


def test_a_run_in_which_a_replica_vanished_by_itself_is_not_repeated(run_of, trace, forecast):
    run = run_of("moeless", ROOMY)
    where, usable_ED = quiet_look(run)
    look = run.looks[where].looks[0]
    left_ED = usable_ED & (usable_ED.sum(axis=1) == 1)[:, None]
    run = with_look(run, where, 0, left_ED=left_ED)
    seen = run.looks[where]
    again = replace(seen, looks=[*seen.looks, look])
    with pytest.raises(TraceError, match=r"had left device \d when it was invoked"):
        simulate(trace, forecast, replace(run, looks=run.looks | {where: again}))


def test_a_trace_that_was_not_run_is_refused(run_of, trace, forecast):
    run = run_of("paper", TIGHT)
    place = first(run, LoadTaken)
    tokens = run.events[place].tokens + 2.0
    with pytest.raises(TraceError, match="replay the trace that was run"):
        simulate(trace, forecast, with_event(run, place, tokens=tokens))
