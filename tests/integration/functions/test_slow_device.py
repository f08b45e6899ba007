"""From devices' times to where experts are: the whole loop of serving, on a clock of its own.

Devices compute nothing and take as long as they are told, so that nothing depends on who else
uses the machine. That workers and supervisor are wired alike is seen in ``test_slow_worker``.
"""

import numpy as np
import torch

from moeless.bootstrap.serving.control import build_controller, build_splitter
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import ManualClock
from moeless.core.cluster import parse_devices
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.planning.load_intake import LoadIntake
from moeless.functions.platform.platform import Platform
from moeless.functions.token_path.dispatch import Answer, ExpertDispatcher
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

LAYERS, EXPERTS, TOP_K, DEVICES = 2, 16, 2, 3
LAYER_S = 0.04
COST = LayerCost(base_s=5e-5, touch_s=2e-5, token_s=1e-6)
SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=TOP_K,
    expert=ExpertShape(hidden=512, intermediate=1024),
)


class Host:
    def __init__(self, device, serving):
        self.device, self.serving = device, serving

    def load(self, function):
        self.serving.orders.append(lambda p: p.loaded(self.device, function))

    def evict(self, function, *, reason):
        self.serving.orders.append(lambda p: p.evicted(self.device, function, reason=reason))


class Serving:
    """An engine and a platform; a ``client.PlatformClient`` and a ``dispatch.Invoker`` in one."""

    wants_loads, function_bytes, num_devices, max_rows = True, 10, DEVICES, 4096

    def __init__(self, **options):
        config = ExpertsConfig(
            devices=parse_devices("cpu:3"),
            policy=PolicyConfig(predictor="previous", search_beside=False, memory_factor=1.0),
            **options,
        )
        self.clock, self.orders = ManualClock(1.0), []
        self.slowness_D = np.ones(DEVICES)
        self.chance = np.random.default_rng(5)
        self.platform = Platform(
            [10 * 32] * DEVICES,
            clock=self.clock,
            keep_alive=FixedKeepAlive(1e9),
            sink=MemorySink(),
        )
        shape = {"num_layers": LAYERS, "num_experts": EXPERTS, "num_devices": DEVICES}
        self.board = Board.in_process(**shape)
        self.model = self.platform.add_model(SPEC, function_bytes=10, board=self.board)
        self.platform.join(self.model, 0, self.board)
        for device in range(DEVICES):
            self.platform.device_up(device, Host(device, self))
        consumer = build_controller(
            config.policy,
            self.model,
            torch_devices=["cpu"] * DEVICES,
            lookahead=0,
            clock=self.clock,
            sink=MemorySink(),
            record=False,
        )
        self.intake = LoadIntake(self.board, consumer)
        consumer.start()
        self.dispatcher = ExpertDispatcher(
            SPEC, client=self, invoker=self, splitter=build_splitter(config, COST)
        )
        self.settle()

    def settle(self):
        while self.orders:
            self.orders.pop(0)(self.platform)

    def announce_loads(self):
        self.intake.take()
        self.settle()

    def demand(self, *, layer, experts):
        self.platform.demand(self.model, ticket=1, layer=layer, experts=experts)
        self.settle()
        return 1

    def await_demand(self, ticket, *, timeout_s):
        assert [result.error for result in self.platform.finished()] == [None]

    def begin(self, layer, *, x_TH, token_S, segments, y_SH=None):
        self.segments, self.y_SH = segments, torch.zeros(len(token_S), 4)

    def finish(self):
        tokens_ED = np.zeros((EXPERTS, DEVICES), dtype=np.int64)
        for device, segments in enumerate(self.segments):
            for expert, start, stop in segments.tolist():
                tokens_ED[expert, device] += stop - start
        noise_D = self.chance.uniform(0.7, 1.3, DEVICES)
        busy_s_D = COST.device_s(tokens_ED) * self.slowness_D * noise_D
        status = [np.zeros(len(segments), dtype=np.uint8) for segments in self.segments]
        return Answer(y_SH=self.y_SH, status=status, busy_ns=(busy_s_D * 1e9).astype(int).tolist())

    def serve(self, seconds):
        """Layers of ``LAYER_S`` each, noise of 30% in what devices take; returns the loads."""
        before = int(self.model.cold_starts_L.sum())
        for _ in range(int(seconds / LAYER_S / LAYERS)):
            for layer in range(LAYERS):
                ids_TK = torch.from_numpy(
                    np.argsort(self.chance.random((30, EXPERTS)), axis=1)[:, :TOP_K].copy()
                )
                self.dispatcher(layer, torch.zeros(30, 4), ids_TK, torch.ones(30, TOP_K))
                self.clock.advance(LAYER_S)
            if int(self.clock.now_s() * 4) != int((self.clock.now_s() - LAYER_S * LAYERS) * 4):
                self.platform.tick()
                self.platform.speeds.take()
                self.settle()
        return int(self.model.cold_starts_L.sum()) - before

    def serve_until(self, condition, *, most_s):
        """Serve for as long as it takes, or for so long."""
        end_s = self.clock.now_s() + most_s
        while not condition():
            assert self.clock.now_s() < end_s, f"not within {most_s} s"
            self.serve(1)

    @property
    def heeded_D(self):
        """Speeds that plans heed, None where all are equal."""
        speed_D = self.model.speed_D()
        return None if speed_D is None else speed_D.tolist()

    @property
    def planned_D(self):
        return self.board.planned_LED.sum(axis=(0, 1)).tolist()


def test_experts_leave_a_device_that_has_become_slow_and_come_back_as_it_recovers():
    serving = Serving()
    serving.serve(15)
    before_D = serving.planned_D
    assert serving.heeded_D is None
    serving.slowness_D[2] = 6.0
    serving.serve_until(lambda: serving.heeded_D == [1.0, 1.0, 0.25], most_s=50)
    serving.serve_until(lambda: 0 < serving.planned_D[2] <= before_D[2] / 2, most_s=20)
    assert serving.board.planned_LED.any(axis=2).all()
    serving.slowness_D[2] = 1.0
    fewest = serving.planned_D[2]
    serving.serve_until(lambda: serving.heeded_D == [1.0, 1.0, 0.5], most_s=130)
    serving.serve_until(lambda: serving.planned_D[2] > fewest, most_s=20)


def test_noise_of_30_percent_loads_nothing():
    serving = Serving()
    loads = serving.serve(60)
    assert serving.board.read_speeds().min() > 0.5
    assert serving.model.speed_D() is None
    assert loads == Serving(live_speeds=False).serve(60)


def test_switched_off_nothing_is_measured_and_experts_stay():
    serving = Serving(live_speeds=False)
    serving.serve(10)
    before_D = serving.planned_D
    serving.slowness_D[2] = 6.0
    serving.serve(40)
    assert serving.board.read_speeds() is None
    assert serving.model.speed_D() is None
    assert serving.planned_D[2] > before_D[2] / 2
