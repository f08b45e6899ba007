"""Failed loads are tried again, later each time."""

import numpy as np

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, FunctionId, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.load_retries import LoadRetries
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

FUNCTION = FunctionId("m", 0, 3)


def test_the_wait_doubles_with_each_failure_up_to_half_a_minute():
    retries, now_s, waits = LoadRetries(), 100.0, []
    for _ in range(9):
        retries.note_failure(FUNCTION, 1, now_s=now_s)
        wait_s = 0.0
        while retries.must_wait(FUNCTION, 1, now_s=now_s + wait_s):
            wait_s += 0.5
        waits.append(wait_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_success_and_a_new_host_make_up_for_all_failures():
    retries = LoadRetries()
    for device in (0, 1, 2):
        retries.note_failure(FUNCTION, device, now_s=0.0)
    retries.note_success(FUNCTION, 0)
    retries.forget_device(1)
    waiting = [device for device in range(3) if retries.must_wait(FUNCTION, device, now_s=0.0)]
    assert waiting == [2]
    assert retries.due(now_s=1.0) == [(FUNCTION, 2)]


class Host:
    def __init__(self):
        self.loads = []

    def load(self, function):
        self.loads.append(function)

    def evict(self, function, *, reason):
        raise AssertionError


class Parts:
    def __init__(self):
        self.clock, self.host = ManualClock(1.0), Host()
        self.platform = Platform(
            [100], clock=self.clock, keep_alive=FixedKeepAlive(60.0), sink=MemorySink()
        )
        spec = ModelSpec(
            model_id="m",
            family="f",
            layer_ids=(0,),
            num_experts=1,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        board = Board.in_process(num_layers=1, num_experts=1, num_devices=1)
        self.model = self.platform.add_model(spec, function_bytes=10, board=board)
        self.model.join(0, board)
        self.platform.device_up(0, self.host)
        self.function = self.model.function(0, 0)

    def plan(self):
        replicas_ED = np.ones((1, 1), dtype=np.uint8)
        plan = Plan(step=1, layer=0, replicas_ED=replicas_ED, load_E=np.ones(1))
        self.model.apply(plan, decision_s=0.0)


def test_plans_do_not_have_a_failed_load_repeated_at_once_but_time_does():
    parts = Parts()
    parts.plan()
    parts.platform.failed(0, parts.function, reason="no memory")
    parts.plan()
    parts.platform.tick()
    assert len(parts.host.loads) == 1
    parts.clock.advance(0.5)
    parts.platform.tick()
    assert len(parts.host.loads) == 2
    parts.platform.loaded(0, parts.function)
    assert parts.model.board.warm_LED[0, 0, 0] == 1


def test_tokens_that_wait_do_not_wait_for_the_time_to_try_again():
    parts = Parts()
    parts.plan()
    parts.platform.failed(0, parts.function, reason="no memory")
    parts.platform.demand(parts.model, ticket=1, layer=0, experts=[0])
    assert len(parts.host.loads) == 2


def test_a_failure_that_began_before_tokens_waited_is_not_their_end():
    parts = Parts()
    parts.plan()
    parts.clock.advance(0.1)
    parts.platform.demand(parts.model, ticket=1, layer=0, experts=[0])
    assert len(parts.host.loads) == 1, "the load under way is waited for"
    parts.platform.failed(0, parts.function, reason="the shard was damaged a moment ago")
    assert parts.platform.finished() == []
    assert len(parts.host.loads) == 2
    parts.platform.failed(0, parts.function, reason="the shard is damaged")
    (result,) = parts.platform.finished()
    assert result.error == "layer 0, expert 0: the shard is damaged"


def test_tokens_that_wait_for_a_model_that_no_device_can_serve_are_told_why():
    parts = Parts()
    parts.platform.bar(parts.model, 0, reason="its files are gone")
    parts.platform.demand(parts.model, ticket=1, layer=0, experts=[0])
    (result,) = parts.platform.finished()
    assert result.error == "layer 0, expert 0: its files are gone"
    parts.plan()
    assert parts.host.loads == []
    parts.platform.unbar(parts.model, 0)
    assert parts.host.loads == [parts.function]
