"""Loads and evictions in simulated time."""

from functools import partial

from moeless.core.model import FunctionId
from moeless.simulator.event_loop import EventLoop, SimulatedClock
from moeless.simulator.host import SimulatedHost


class Platform:
    def __init__(self, clock):
        self.clock = clock
        self.heard = []

    def loaded(self, device, function):
        self.heard.append(("loaded", device, function.expert, self.clock.now_s()))

    def evicted(self, device, function, *, reason):
        self.heard.append(("evicted", device, function.expert, self.clock.now_s(), reason))


def make(device=0):
    loop = EventLoop(SimulatedClock())
    platform = Platform(loop.clock)
    changes = []
    host = SimulatedHost(
        device,
        loop=loop,
        platform=platform,
        load_s=2.0,
        on_change=lambda: changes.append(loop.clock.now_s()),
    )
    return loop, platform, host, changes


def f(expert):
    return FunctionId("m", 0, expert)


def test_loads_of_one_device_share_its_link_one_after_the_other():
    loop, platform, host, changes = make()
    loop.at(1.0, partial(host.load, f(0)))
    loop.at(1.5, partial(host.load, f(1)))
    loop.at(10.0, partial(host.load, f(2)))
    loop.run()
    assert platform.heard == [("loaded", 0, 0, 3.0), ("loaded", 0, 1, 5.0), ("loaded", 0, 2, 12.0)]
    assert changes == [3.0, 5.0, 12.0]


def test_an_eviction_takes_no_time_but_ends_after_its_caller_has_returned():
    loop, platform, host, changes = make(device=3)

    def evict():
        host.evict(f(4), reason="room")
        assert platform.heard == []

    loop.at(7.0, evict)
    loop.run()
    assert platform.heard == [("evicted", 3, 4, 7.0, "room")]
    assert changes == [7.0]
