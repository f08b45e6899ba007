"""Simulated time."""

from functools import partial

from moeless.simulator.event_loop import EventLoop, SimulatedClock


def test_actions_happen_in_the_order_of_their_times_whatever_the_order_they_came_in():
    loop = EventLoop(SimulatedClock())
    seen = []
    for time_s in (3.0, 1.0, 2.0):
        loop.at(time_s, lambda: seen.append(loop.clock.now_s()))
    loop.run()
    assert seen == [1.0, 2.0, 3.0]
    assert not loop.has_more()


def test_actions_of_the_same_time_happen_in_the_order_they_came_in():
    loop = EventLoop(SimulatedClock())
    seen = []
    for name in "cab":
        loop.at(1.0, partial(seen.append, name))
    loop.run()
    assert seen == ["c", "a", "b"]


def test_an_action_may_add_actions_even_for_now():
    loop = EventLoop(SimulatedClock())
    seen = []

    def first():
        seen.append("first")
        loop.at(1.0, partial(seen.append, "now"))
        loop.at(5.0, partial(seen.append, "later"))

    loop.at(1.0, first)
    loop.at(2.0, partial(seen.append, "second"))
    loop.run()
    assert seen == ["first", "now", "second", "later"]


def test_what_is_left_when_the_loop_stops_stays_for_the_next_run():
    loop = EventLoop(SimulatedClock())
    seen = []
    loop.at(1.0, loop.stop)
    loop.at(2.0, partial(seen.append, "left"))
    loop.run()
    assert seen == []
    assert loop.has_more()
    loop.run()
    assert seen == ["left"]
