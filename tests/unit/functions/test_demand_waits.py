"""Tokens wait for a device that is on its way, if it may load what another one could not."""

import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

EXPERTS = 2


class Host:
    """Loads, unless it has no memory or the file is damaged."""

    def __init__(self, device, parts, *, fails=None):
        self.device, self.parts, self.fails = device, parts, fails

    def load(self, function):
        def end(platform):
            if self.fails is None:
                platform.loaded(self.device, function)
            else:
                elsewhere = self.fails == "no memory"
                platform.failed(self.device, function, reason=self.fails, elsewhere=elsewhere)

        self.parts.orders.append(end)

    def evict(self, function, *, reason):
        self.parts.orders.append(lambda p: p.evicted(self.device, function, reason=reason))


class Parts:
    """Two devices; the first one is on its way."""

    def __init__(self, *, first_bytes=40):
        self.orders = []
        self.platform = Platform(
            [first_bytes, 40],
            clock=ManualClock(5.0),
            keep_alive=FixedKeepAlive(1e6),
            sink=MemorySink(),
        )
        board = Board.in_process(num_layers=1, num_experts=EXPERTS, num_devices=2)
        self.model = self.platform.add_model(
            ModelSpec(
                model_id="m",
                family="mixtral",
                layer_ids=(0,),
                num_experts=EXPERTS,
                top_k=1,
                expert=ExpertShape(hidden=1, intermediate=1),
            ),
            function_bytes=10,
            board=board,
        )
        self.platform.join(self.model, 0, board)
        self.up(0)
        self.platform.device_down(0, returns=True)

    def up(self, device, **host):
        self.platform.device_up(device, Host(device, self, **host))
        self.settle()

    def down(self, device, **how):
        self.platform.device_down(device, **how)
        self.settle()

    def demand(self):
        self.platform.demand(self.model, ticket=1, layer=0, experts=[0])
        self.settle()

    def settle(self):
        while self.orders:
            self.orders.pop(0)(self.platform)

    def ended(self):
        return [result.error for result in self.platform.finished()]


def test_what_one_device_has_no_memory_for_waits_for_the_one_that_returns():
    parts = Parts()
    parts.up(1, fails="no memory")
    parts.demand()
    assert parts.ended() == []
    parts.up(0)
    assert parts.ended() == [None]


def test_a_device_that_has_no_memory_either_ends_the_wait():
    parts = Parts()
    parts.up(1, fails="no memory")
    parts.demand()
    parts.up(0, fails="no memory")
    assert parts.ended() == ["layer 0, expert 0: no memory"]


def test_a_damaged_file_is_not_waited_for():
    parts = Parts()
    parts.up(1, fails="damaged")
    parts.demand()
    assert parts.ended() == ["layer 0, expert 0: damaged"]


def test_a_device_that_does_not_return_after_all_ends_the_wait():
    parts = Parts()
    parts.up(1, fails="no memory")
    parts.demand()
    parts.down(0)
    assert parts.ended() == ["layer 0, expert 0: no memory"]


def test_a_new_host_of_the_device_that_had_no_memory_may_have_some():
    parts = Parts()
    parts.up(0, fails="no memory")
    parts.up(1)
    parts.down(1, returns=True)
    parts.demand()
    assert parts.ended() == [], "the second device may do it"
    parts.down(0, returns=True)
    parts.up(0)
    assert parts.ended() == [None]


def test_a_device_that_holds_no_expert_is_not_waited_for():
    parts = Parts(first_bytes=20)
    parts.platform.set_budget(0, 5)
    parts.up(1, fails="no memory")
    parts.demand()
    assert parts.ended() == ["layer 0, expert 0: no memory"]


@pytest.mark.parametrize("fails", ["no memory", "damaged"])
def test_with_all_devices_up_nothing_is_waited_for(fails):
    parts = Parts()
    parts.up(0, fails=fails)
    parts.up(1, fails=fails)
    parts.demand()
    assert parts.ended() == [f"layer 0, expert 0: {fails}"]
