"""Real workers under a real supervisor, and the simulator, decide the same on one trace.

The simulator is told in which order the supervisor heard of things, and what the token path saw
when it looked, so that the machine's other work decides nothing here. Everything else it has to
find out itself: which replicas there are to be, what is loaded and evicted and in which order,
who makes room for whom, which experts tokens wait for, and how they are divided.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from fakes.look_recorder import LookRecorder
from fakes.replays import make_trace
from families import make_tiny
from moeless.bootstrap.control import build_policies, serving_cost
from moeless.bootstrap.experts import start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.events import (
    DemandTaken,
    Event,
    InstanceEvicted,
    InstanceLoaded,
    LoadTaken,
    PlanFailed,
    PlanMade,
    ReplicasChanged,
)
from moeless.core.model import ModelSpec
from moeless.costs.linear import LinearTime
from moeless.engines.transformers.loader import load_engine_model
from moeless.errors import TraceError
from moeless.functions.announcer import ExpectedLoad, LookAhead
from moeless.functions.dispatch import ExpertDispatcher
from moeless.functions.host import function_bytes
from moeless.functions.load_report import devices_of_experts
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import NoisyForecast
from moeless.simulator.recorded_times import LayerLooks, RecordedTimes
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.telemetry.jsonl import read_events

STEPS, LAYERS, EXPERTS, TOP_K, DEVICES = 70, 3, 8, 2, 2
MEMORY_FACTOR = 1.25
ROOMY = LAYERS * EXPERTS
"""Instances for which each device has room: of all experts."""
TIGHT = 10
"""Two layers and a half on both devices together: each step, some make room for others."""


class WatchedSplitter:
    """A splitter whose every split is written down."""

    def __init__(self, splitter):
        self._splitter = splitter
        self.shares = []

    def split(self, count_E, replicas_ED):
        share_ED = self._splitter.split(count_E, replicas_ED)
        self.shares.append(share_ED.copy())
        return share_ED


class WatchedPlanner:
    """A planner whose every plan is written down."""

    def __init__(self, planner):
        self._planner = planner
        self.plans = []
        for name in ("observe", "search_due", "search", "stands"):
            if hasattr(planner, name):
                setattr(self, name, getattr(planner, name))

    def plan(self, request):
        plan = self._planner.plan(request)
        self.plans.append((plan.step, plan.layer, devices_of_experts(plan.replicas_ED)))
        return plan


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of real workers: its events, its looks at the board and its splits."""

    name: str
    slots: int
    spec: ModelSpec
    events: list[Event]
    looks: dict[tuple[int, int], LayerLooks]
    shares: list[np.ndarray]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


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


def policy_config(name):
    # A search in a thread of its own sees whatever loads are there when it happens to run.
    return PolicyConfig(policy=name, memory_factor=MEMORY_FACTOR, search_beside=False)


def await_that(condition, what):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def run_workers(checkpoint, name, slots, ids, forecast, path):
    """Give the trace's choices to real workers, and write down what they and we did."""
    loaded = load_engine_model(checkpoint)
    config = ExpertsConfig(
        devices=parse_devices(f"cpu:{DEVICES}"),
        policy=policy_config(name),
        device_memory_bytes=slots * function_bytes(loaded.spec.expert, "cpu"),
        worker_threads=1,
        events=path,
    )
    runtime = start_experts(loaded, config)
    try:
        recorder = follow_trace(runtime, name, ids, forecast, path)
    finally:
        runtime.close()
    return Run(
        name=name,
        slots=slots,
        spec=runtime.spec,
        events=read_events(path),
        looks=recorder.looks,
        shares=recorder.shares,
    )


def follow_trace(runtime, name, ids, forecast, path):
    spec = runtime.spec
    now = {"step": 0}

    def look_ahead(layer, x_TH):
        if layer + 1 == LAYERS:
            return None
        return ExpectedLoad(forecast.expected_LE(now["step"])[layer + 1])

    policies = build_policies(
        policy_config(name), cost=serving_cost(spec.expert, ["cpu"] * DEVICES), clock=SystemClock()
    )
    recorder = LookRecorder(runtime, policies.splitter)
    dispatcher = ExpertDispatcher(
        spec,
        client=recorder.client,
        invoker=recorder.invoker,
        splitter=recorder,
        look_ahead=LookAhead(distance=1, forecast=look_ahead),
    )
    x_TH = torch.randn(64, spec.expert.hidden)
    for step, choices in enumerate(ids):
        now["step"] = step
        for layer, ids_TK in enumerate(choices):
            rows_TH, weights_TK = x_TH[: len(ids_TK)], torch.full(ids_TK.shape, 1 / TOP_K)
            chosen_TK = torch.from_numpy(ids_TK)
            recorder.run(dispatcher, step, layer, rows_TH, chosen_TK, weights_TK)
    last = partial(is_taken, path, step=STEPS, layer=LAYERS - 1)
    await_that(last, "the last load is not taken")
    return recorder


def is_taken(path, *, step, layer):
    """Whether the control loop was told what came true in a layer-step."""
    return any(
        (event.kind, event.step, event.layer) == ("actual", step, layer)
        for event in read_events(path)
        if isinstance(event, LoadTaken)
    )


def simulate(trace, forecast, run):
    """Replay the trace with the run's times."""
    cost = serving_cost(run.spec.expert, ["cpu"] * DEVICES)
    clock = SimulatedClock()
    policies = build_policies(policy_config(run.name), cost=cost, clock=clock)
    planner, splitter = WatchedPlanner(policies.planner), WatchedSplitter(policies.splitter)
    parts = vars(policies) | {"planner": planner, "splitter": splitter}
    expert = run.spec.expert
    replay_policy(
        trace,
        type(policies)(**parts),
        clock=clock,
        time_model=LinearTime(cost=cost, label="test"),
        forecast=forecast,
        keep_alive=FixedKeepAlive(float("inf")),
        config=ReplayConfig(
            num_devices=DEVICES,
            device_bytes=run.slots * expert.num_bytes,
            expert=expert,
            load_s=0.0,
            lookahead=1,
            times=RecordedTimes.of(run.events, run.looks),
        ),
    )
    return planner.plans, splitter.shares


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


def first(run, kind):
    """The place of a kind's first event in a run."""
    return next(place for place, event in enumerate(run.events) if isinstance(event, kind))


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
    where = (STEPS - 1, 0)
    usable_ED = run.looks[where].looks[0].usable_ED
    expert = int(np.flatnonzero(usable_ED.sum(axis=1) == 1)[0])
    other_ED = usable_ED.copy()
    other_ED[expert] = ~usable_ED[expert]
    with pytest.raises(TraceError, match=rf"the run (found|did not find) .* expert {expert} on"):
        simulate(trace, forecast, with_look(run, where, 0, usable_ED=other_ED))


def test_a_run_in_which_a_replica_vanished_by_itself_is_not_repeated(run_of, trace, forecast):
    run = run_of("moeless", ROOMY)
    where = (STEPS - 1, 0)
    look = run.looks[where].looks[0]
    left_ED = np.zeros_like(look.usable_ED)
    left_ED[tuple(np.argwhere(look.usable_ED)[0])] = True
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
