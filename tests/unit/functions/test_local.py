"""The platform in a thread of the engine's process, with hosts that hold nothing real."""

import threading

import pytest

from effort import PATIENCE_S
from moeless.control.controller import Controller, ControllerConfig
from moeless.core.clock import SystemClock
from moeless.core.events import InstanceEvicted
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.policy_set import PolicySet
from moeless.errors import BudgetError, CheckpointError, FunctionError, UnavailableError
from moeless.functions.local import LocalClient
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.policies.planners.static import StaticPlanner
from moeless.policies.predictors.previous import PreviousPredictor
from moeless.policies.splitters.even import EvenSplitter
from moeless.telemetry.memory import MemorySink

SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=(0, 1),
    num_experts=4,
    top_k=1,
    expert=ExpertShape(hidden=1, intermediate=1),
)


class Host:
    def __init__(self):
        self.held = set()
        self.error = None

    def load(self, function):
        if self.error is not None:
            raise self.error
        self.held.add(function)
        return 10

    def rest(self):
        """Nothing to give back."""

    def evict(self, function):
        self.held.remove(function)


class Sink(MemorySink):
    """Lets a test wait for events."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def emit(self, event):
        with self.changed:
            super().emit(event)
            self.changed.notify_all()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, timeout=PATIENCE_S)


@pytest.fixture
def start():
    clients = []

    def make(*, slots=8, keep_s=1000.0, sink=None, planner=None, hosts=None):
        hosts = hosts or [Host(), Host()]
        sink = sink or Sink()

        def make_controller(model):
            return Controller(
                ControllerConfig(model="m", num_layers=2, num_experts=4),
                policies=PolicySet(
                    name="static",
                    planner=planner or StaticPlanner(),
                    splitter=EvenSplitter(),
                    history=PreviousPredictor(),
                    adaptive=False,
                ),
                placement=model,
                clock=SystemClock(),
                sink=sink,
            )

        client = LocalClient(
            SPEC,
            hosts,
            budgets_bytes=[slots * 10] * 2,
            function_bytes=10,
            clock=SystemClock(),
            keep_alive=FixedKeepAlive(keep_s),
            sink=sink,
            make_controller=make_controller,
        )
        clients.append(client)
        return client, hosts, sink

    yield make
    for client in clients:
        client.close()


def warm_all(client, layer=0):
    client.await_demand(client.demand(layer=layer, experts=[0, 1, 2, 3]), timeout_s=PATIENCE_S)


def test_what_is_demanded_is_warm_when_the_wait_ends(start):
    client, hosts, _ = start()
    for layer in (0, 1):
        warm_all(client, layer)
        assert client.board.warm_LED[layer].any(axis=1).all()
    held = [{(f.layer, f.expert) for f in host.held} for host in hosts]
    assert held[0] | held[1] == {(layer, e) for layer in (0, 1) for e in range(4)}
    report = client.report()
    assert report["resident_bytes_D"] == [len(h) * 10 for h in held]
    assert report["worker_restarts"] == [0, 0]
    assert (client.num_devices, client.function_bytes, client.wants_loads) == (2, 10, False)


@pytest.mark.parametrize("error", [CheckpointError("shard gone"), OSError("shard gone")])
def test_whatever_a_load_raises_on_all_devices_ends_the_wait_with_its_reason(start, error):
    hosts = [Host(), Host()]
    for host in hosts:
        host.error = error
    client, _, _ = start(hosts=hosts)
    with pytest.raises(UnavailableError, match="layer 0, expert 2: shard gone"):
        client.await_demand(client.demand(layer=0, experts=[2]), timeout_s=PATIENCE_S)
    for host in hosts:
        host.error = None
    warm_all(client)


def test_a_load_that_fails_on_one_device_is_tried_on_the_other(start):
    hosts = [Host(), Host()]
    hosts[0].error = FunctionError("cuda:0 has no memory left")
    client, _, _ = start(hosts=hosts)
    warm_all(client)
    assert len(hosts[1].held) >= 4
    assert not hosts[0].held


def test_idle_instances_leave_even_while_tasks_keep_coming(start):
    client, _, sink = start(keep_s=0.0)
    busy = threading.Event()

    def keep_busy():
        while not busy.wait(0.001):
            client.announce_loads()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        sink.wait_for(lambda: any(e.reason == "keep-alive" for e in sink.of(InstanceEvicted)))
    finally:
        busy.set()
        thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_platform_that_fails_says_so_instead_of_letting_tokens_wait(start):
    class Sour(Sink):
        def emit(self, event):
            raise ValueError("sink is full")

    client, _, _ = start(sink=Sour())
    with pytest.raises(FunctionError, match="the platform failed: sink is full"):
        client.await_demand(client.demand(layer=0, experts=[0]), timeout_s=PATIENCE_S)


def test_too_small_devices_are_refused_with_the_least_that_works(start):
    with pytest.raises(BudgetError, match="give each of the 2 devices at least 20 bytes"):
        start(slots=1)


def test_a_wait_that_takes_too_long_ends_and_says_for_what(start):
    client, _, _ = start()
    for experts, text in [([1], "expert 1 was"), ([0, 1], "experts 0, 1 were")]:
        client.demand(layer=0, experts=experts)
        with pytest.raises(UnavailableError, match=f"layer 0: {text} not loaded within 0 s"):
            client.await_demand(99, timeout_s=0.0)
