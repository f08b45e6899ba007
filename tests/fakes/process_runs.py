"""A trace given to real workers under a real supervisor, and the replay of what they recorded."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from effort import wait_until
from fakes.look_recorder import LookRecorder
from fakes.watched_planner import WatchedPlanner
from moeless.bootstrap.serving.control import build_policies, serving_cost
from moeless.bootstrap.serving.experts import start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.events import Event, LoadTaken
from moeless.core.model import ModelSpec
from moeless.costs.linear import LinearTime
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.compute.experts import function_bytes
from moeless.functions.planning.load_report import devices_of_experts
from moeless.functions.token_path.announcer import ExpectedLoad, LookAhead
from moeless.functions.token_path.dispatch import ExpertDispatcher
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.recorded_times import LayerLooks, RecordedTimes
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.telemetry.jsonl import read_events

DEVICES = 2
MEMORY_FACTOR = 1.25


class WatchedSplitter:
    """A splitter whose every split is written down."""

    def __init__(self, splitter):
        self._splitter = splitter
        self.shares = []

    def split(self, count_E, replicas_ED):
        share_ED = self._splitter.split(count_E, replicas_ED)
        self.shares.append(share_ED.copy())
        return share_ED


def _where(_request, plan):
    return plan.step, plan.layer, devices_of_experts(plan.replicas_ED)


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


def policy_config(name):
    return PolicyConfig(policy=name, memory_factor=MEMORY_FACTOR)


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
        if layer + 1 == spec.num_layers:
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
            rows_TH, weights_TK = x_TH[: len(ids_TK)], torch.full(ids_TK.shape, 1 / spec.top_k)
            chosen_TK = torch.from_numpy(ids_TK)
            recorder.run(dispatcher, step, layer, rows_TH, chosen_TK, weights_TK)
    last = partial(is_taken, path, step=len(ids), layer=spec.num_layers - 1)
    wait_until(last, "the last load is not taken")
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
    planner, splitter = (
        WatchedPlanner(policies.planner, _where),
        WatchedSplitter(policies.splitter),
    )
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
    return planner.noted, splitter.shares
