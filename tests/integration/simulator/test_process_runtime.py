"""Real workers under a real supervisor, and the simulator, decide the same on one trace.

The simulator is told when decisions and loads were over in the run, so that the machine's other
work decides nothing here; everything else it has to find out itself. Devices have room for all
experts: which idle replica makes room first depends on when each was last used, to the
nanosecond, and that is not recorded.
"""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from fakes.replays import make_trace
from families import make_tiny
from moeless.bootstrap.control import build_policies, serving_cost
from moeless.bootstrap.experts import start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.events import Event, InstanceLoaded, PlanFailed, PlanMade, ReplicasChanged
from moeless.core.model import ModelSpec
from moeless.costs.linear import LinearTime
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.announcer import ExpectedLoad, LookAhead
from moeless.functions.dispatch import ExpertDispatcher
from moeless.functions.host import function_bytes
from moeless.functions.load_report import devices_of_experts
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import NoisyForecast
from moeless.simulator.recorded_times import GateTime, RecordedTimes
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.telemetry.jsonl import read_events

STEPS, LAYERS, EXPERTS, TOP_K, DEVICES = 70, 3, 8, 2, 2
MEMORY_FACTOR = 1.25


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of the token path: what could be used, and what each replica got."""

    usable_ED: np.ndarray
    share_ED: np.ndarray
    time_s: float


class WatchedSplitter:
    """A splitter whose every split is written down."""

    def __init__(self, splitter):
        self._splitter = splitter
        self.splits = []

    def split(self, count_E, replicas_ED):
        now_s, usable_ED = time.monotonic(), replicas_ED.copy()
        share_ED = self._splitter.split(count_E, replicas_ED)
        self.splits.append(Split(usable_ED=usable_ED, share_ED=share_ED.copy(), time_s=now_s))
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
    """A run of real workers: its events, its gates and the first split of each layer-step."""

    spec: ModelSpec
    events: list[Event]
    gates: dict[tuple[int, int], GateTime]
    share_SLED: np.ndarray


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


def policy_config(name):
    # A search in a thread of its own sees whatever loads are there when it happens to run.
    return PolicyConfig(policy=name, memory_factor=MEMORY_FACTOR, search_beside=False)


def await_that(condition, what):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def run_workers(checkpoint, name, ids, forecast, path):
    """Give the trace's choices to real workers, and write down what they and we did."""
    loaded = load_engine_model(checkpoint)
    config = ExpertsConfig(
        devices=parse_devices(f"cpu:{DEVICES}"),
        policy=policy_config(name),
        device_memory_bytes=LAYERS * EXPERTS * function_bytes(loaded.spec.expert, "cpu"),
        worker_threads=1,
        events=path,
    )
    runtime = start_experts(loaded, config)
    try:
        return follow_trace(runtime, name, ids, forecast, path)
    finally:
        runtime.close()


def follow_trace(runtime, name, ids, forecast, path):
    spec, board = runtime.spec, runtime.client.board
    now = {"step": 0}

    def look_ahead(layer, x_TH):
        if layer + 1 == LAYERS:
            return None
        return ExpectedLoad(forecast.expected_LE(now["step"])[layer + 1])

    policies = build_policies(
        policy_config(name), cost=serving_cost(spec.expert, ["cpu"] * DEVICES), clock=SystemClock()
    )
    splitter = WatchedSplitter(policies.splitter)
    dispatcher = ExpertDispatcher(
        spec,
        client=runtime.client,
        invoker=runtime.invoker,
        splitter=splitter,
        look_ahead=LookAhead(distance=1, forecast=look_ahead),
    )
    planned = lambda: (board.planned_LED > board.warm_LED).sum() == 0  # noqa: E731 - one use
    await_that(lambda: board.planned_LED.any() and planned(), "the first plans are not loaded")
    gates, shares = {}, []
    x_TH = torch.randn(64, spec.expert.hidden)
    for step, choices in enumerate(ids):
        now["step"] = step
        for layer, ids_TK in enumerate(choices):
            first, began_s = len(splitter.splits), time.monotonic()
            weights_TK = torch.full(ids_TK.shape, 1 / TOP_K)
            dispatcher(layer, x_TH[: len(ids_TK)], torch.from_numpy(ids_TK), weights_TK)
            split = splitter.splits[first]
            gates[step, layer] = GateTime(
                began_s=began_s, looked_s=split.time_s, usable_ED=split.usable_ED
            )
            shares.append(split.share_ED)
    last = partial(is_taken, path, step=STEPS, layer=LAYERS - 1)
    await_that(last, "the last load is not taken")
    return Run(
        spec=spec,
        events=read_events(path),
        gates=gates,
        share_SLED=np.array(shares).reshape(STEPS, LAYERS, EXPERTS, DEVICES),
    )


def is_taken(path, *, step, layer):
    """Whether the control loop was told what came true in a layer-step."""
    wanted = ("LoadTaken", "actual", step, layer)
    return any(
        (type(event).__name__, event.kind, event.step, event.layer) == wanted
        for event in read_events(path)
        if type(event).__name__ == "LoadTaken"
    )


def simulate(name, trace, forecast, run):
    """Replay the trace with the run's times."""
    cost = serving_cost(run.spec.expert, ["cpu"] * DEVICES)
    clock = SimulatedClock()
    policies = build_policies(policy_config(name), cost=cost, clock=clock)
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
            device_bytes=LAYERS * EXPERTS * expert.num_bytes,
            expert=expert,
            load_s=0.0,
            lookahead=1,
            times=RecordedTimes.of(run.events, run.gates),
        ),
    )
    return planner.plans, splitter.splits


def changes(plans):
    """Only the plans that differ from the layer's plan before."""
    known, changed = {}, []
    for _, layer, devices_E in plans:
        if known.get(layer) != devices_E:
            known[layer] = devices_E
            changed.append((layer, devices_E))
    return changed


@pytest.mark.parametrize("name", ["paper", "moeless"])
def test_the_simulator_decides_as_real_workers_did_when_told_their_times(
    name, checkpoint, ids, trace, tmp_path
):
    forecast = NoisyForecast(trace.loads_NLE, sigma=0.2, seed=1)
    run = run_workers(checkpoint, name, ids, forecast, tmp_path / "events.jsonl")
    plans, splits = simulate(name, trace, forecast, run)

    made = [(e.step, e.layer) for e in run.events if isinstance(e, PlanMade)]
    assert made == [(step, layer) for step, layer, _ in plans]
    changed = [(e.layer, e.devices_E) for e in run.events if isinstance(e, ReplicasChanged)]
    assert changed == changes(plans)
    assert len(splits) == STEPS * LAYERS
    for (step, layer), split in zip(run.gates, splits, strict=True):
        where = f"step {step}, layer {layer}"
        usable_ED = run.gates[step, layer].usable_ED
        np.testing.assert_array_equal(split.usable_ED, usable_ED, err_msg=where)
        np.testing.assert_array_equal(
            split.share_ED.sum(axis=0), run.share_SLED[step, layer].sum(axis=0), err_msg=where
        )
    # It was worth looking at: plans changed while the run went on, and replicas came with them.
    assert len(changed) > LAYERS
    assert sum(isinstance(e, InstanceLoaded) for e in run.events) > LAYERS * EXPERTS
    assert not any(isinstance(e, PlanFailed) for e in run.events)
