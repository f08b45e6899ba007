"""Serving's dispatcher and the simulator's token path make the same decisions on one trace."""

import numpy as np
import pytest
import torch

from fakes.replays import COST, EXPERT, make_trace
from fakes.watched_planner import WatchedPlanner
from moeless.bootstrap.policies import PolicyOptions, build_policy_set
from moeless.control.controller import Controller, ControllerConfig
from moeless.core.clock import ManualClock
from moeless.core.model import ModelSpec
from moeless.costs.linear import LinearTime
from moeless.functions.links.board import Board
from moeless.functions.planning.load_intake import LoadIntake
from moeless.functions.platform.platform import Platform
from moeless.functions.token_path.announcer import ExpectedLoad, LookAhead
from moeless.functions.token_path.dispatch import Answer, ExpertDispatcher
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import ExactForecast
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.telemetry.memory import MemorySink

pytestmark = pytest.mark.slow

STEPS, LAYERS, EXPERTS, DEVICES, TOP_K = 50, 3, 6, 3, 2
DEVICE_BYTES = 8 * LAYERS * EXPERT.num_bytes


def question_and_answer(request, plan):
    return (
        request.step,
        request.layer,
        request.load_E.tolist(),
        request.previous_ED.tolist(),
        request.alive_ED.tolist(),
        request.capacity_D.tolist(),
        plan.replicas_ED.tolist(),
    )


class InstantHost:
    """Carries orders out as soon as whoever gave them has returned."""

    def __init__(self, device, platform, orders):
        self.device, self.platform, self.orders = device, platform, orders

    def load(self, function):
        self.orders.append(lambda: self.platform.loaded(self.device, function))

    def evict(self, function, *, reason):
        self.orders.append(lambda: self.platform.evicted(self.device, function, reason=reason))


class InstantClient:
    """The platform in the same thread, without any time passing."""

    wants_loads = True
    num_devices = DEVICES
    function_bytes = EXPERT.num_bytes

    def __init__(self, policies):
        clock, sink = ManualClock(1.0), MemorySink()
        self.board = Board.in_process(num_layers=LAYERS, num_experts=EXPERTS, num_devices=DEVICES)
        self.platform = Platform(
            [DEVICE_BYTES] * DEVICES,
            clock=clock,
            keep_alive=FixedKeepAlive(float("inf")),
            sink=sink,
        )
        self.model = self.platform.add_model(
            make_spec(), function_bytes=EXPERT.num_bytes, board=self.board
        )
        self.model.join(0, self.board)
        self.orders = []
        for device in range(DEVICES):
            host = InstantHost(device, self.platform, self.orders)
            self.platform.device_up(device, host)
        controller = Controller(
            ControllerConfig(model="m", num_layers=LAYERS, num_experts=EXPERTS, lookahead=1),
            policies=policies,
            placement=self.model,
            clock=clock,
            sink=sink,
            searcher=self,
        )
        self.intake = LoadIntake(self.board, controller)
        controller.start()
        self._settle()

    def submit(self, search):
        self.orders.append(search)

    def announce_loads(self):
        self.intake.take()
        self._settle()

    def demand(self, *, layer, experts):
        self.platform.demand(self.model, ticket=1, layer=layer, experts=experts)
        self._settle()
        return 1

    def await_demand(self, ticket, *, timeout_s):
        assert [result.error for result in self.platform.finished()] == [None]

    def _settle(self):
        while self.orders:
            self.orders.pop(0)()


class NoInvoker:
    """Computes nothing, and remembers what each device was given."""

    max_rows = 4096

    def __init__(self):
        self.tokens = []

    def begin(self, layer, *, x_TH, token_S, segments, y_SH=None):
        self.segments = segments
        self.y_SH = torch.zeros(len(token_S), x_TH.shape[1])
        self.tokens.append([int((s[:, 2] - s[:, 1]).sum()) for s in segments])

    def finish(self):
        status = [np.zeros(len(s), dtype=np.uint8) for s in self.segments]
        return Answer(y_SH=self.y_SH, status=status, busy_ns=[1] * DEVICES)

    def close(self):
        pass


def make_spec():
    return ModelSpec(
        model_id="m",
        family="mixtral",
        layer_ids=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert=EXPERT,
    )


def draw_ids():
    """Chosen experts of every step and layer, skewed and drifting."""
    rng = np.random.default_rng(3)
    weight_LE = rng.gamma(0.8, size=(LAYERS, EXPERTS)) + 0.05
    steps = []
    for _ in range(STEPS):
        weight_LE = weight_LE * np.exp(0.3 * rng.standard_normal(weight_LE.shape))
        rows = int(rng.integers(1, 60))
        score = np.log(weight_LE)[:, None] + rng.gumbel(size=(LAYERS, rows, EXPERTS))
        steps.append(np.argsort(-score, axis=2)[:, :, :TOP_K])
    return steps


def build(name):
    policies = build_policy_set(
        name,
        cost=COST,
        options=PolicyOptions(memory_factor=1.7),
        clock=ManualClock(),
    )
    watched = WatchedPlanner(policies.planner, question_and_answer)
    return watched, type(policies)(**(vars(policies) | {"planner": watched}))


def serve(name, ids, loads_SLE):
    watched, policies = build(name)
    client, invoker = InstantClient(policies), NoInvoker()
    step_of = iter(range(STEPS))
    now = {"step": -1}

    def forecast(layer, x_TH):
        ahead = layer + 1
        return ExpectedLoad(loads_SLE[now["step"], ahead]) if ahead < LAYERS else None

    dispatcher = ExpertDispatcher(
        make_spec(),
        client=client,
        invoker=invoker,
        splitter=policies.splitter,
        look_ahead=LookAhead(distance=1, forecast=forecast),
    )
    for step in step_of:
        now["step"] = step
        for layer in range(LAYERS):
            ids_TK = torch.from_numpy(ids[step][layer])
            x_TH = torch.zeros(len(ids_TK), EXPERT.hidden)
            dispatcher(layer, x_TH, ids_TK, torch.ones(ids_TK.shape))
    return watched.noted, np.array(invoker.tokens).reshape(STEPS, LAYERS, DEVICES)


def simulate(name, loads_SLE):
    watched, policies = build(name)
    trace = make_trace(loads_SLE, top_k=TOP_K)
    recording = replay_policy(
        trace,
        policies,
        clock=SimulatedClock(),
        time_model=LinearTime(cost=COST, label="test"),
        forecast=ExactForecast(trace.loads_NLE),
        keep_alive=FixedKeepAlive(float("inf")),
        config=ReplayConfig(
            num_devices=DEVICES,
            device_bytes=DEVICE_BYTES,
            expert=EXPERT,
            load_s=0.0,
            lookahead=1,
            decision_s=0.0,
            search_s=0.0,
        ),
    )
    return watched.noted, recording.device_tokens_SLD


@pytest.mark.parametrize("name", ["paper", "moeless"])
def test_plans_and_shares_are_the_same_in_serving_and_in_the_simulator(name):
    ids = draw_ids()
    loads_SLE = np.array(
        [
            [np.bincount(ids[s][layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)]
            for s in range(STEPS)
        ]
    )
    served, served_tokens = serve(name, ids, loads_SLE)
    simulated, simulated_tokens = simulate(name, loads_SLE)
    assert len(served) > STEPS * LAYERS
    for number, (ours, theirs) in enumerate(zip(served, simulated, strict=True)):
        assert ours == theirs, f"decision {number}"
    np.testing.assert_array_equal(served_tokens, simulated_tokens)
