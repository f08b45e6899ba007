"""Orders come first; what can wait is done in pauses, but does not wait for ever."""

import threading

import pytest

from effort import PATIENCE_S
from moeless.functions.host import order_queue
from moeless.functions.host.order_queue import OrderQueue


class Host:
    """Has so many instances to lay out; writes down what it is asked."""

    def __init__(self, waiting=0):
        self.waiting = waiting
        self.done = []
        self.rested = threading.Event()
        self.laid_out = threading.Event()

    def lay_out_next(self):
        if self.waiting == 0:
            self.laid_out.set()
            return False
        self.waiting -= 1
        self.done.append("lay out")
        return True

    def rest(self):
        self.done.append("rest")
        self.rested.set()


@pytest.fixture
def take_later():
    """Take in a thread of its own; what was taken is joined at the end."""
    threads = []

    def start(orders):
        taken = []
        thread = threading.Thread(target=lambda: taken.append(orders.take()))
        thread.start()
        threads.append(thread)
        return taken, thread

    yield start
    assert not any(thread.is_alive() for thread in threads)


def test_orders_are_taken_in_sequence_before_anything_is_laid_out():
    host = Host(waiting=2)
    orders = OrderQueue(host)
    for order in "abc":
        orders.put(order)
    assert [orders.take() for _ in range(3)] == ["a", "b", "c"]
    assert host.done == []


def test_a_pause_lays_everything_out_and_then_rests_once(monkeypatch, take_later):
    monkeypatch.setattr(order_queue, "_REST_AFTER_S", 0.01)
    host = Host(waiting=3)
    orders = OrderQueue(host)
    taken, thread = take_later(orders)
    assert host.rested.wait(timeout=PATIENCE_S)
    orders.put("a")
    thread.join(timeout=PATIENCE_S)
    assert taken == ["a"]
    assert host.done == ["lay out"] * 3 + ["rest"]


def test_an_order_interrupts_laying_out():
    orders = None

    class Busy(Host):
        def lay_out_next(self):
            orders.put("a")
            return super().lay_out_next()

    host = Busy(waiting=3)
    orders = OrderQueue(host)
    assert orders.take() == "a"
    assert host.waiting == 2


def test_orders_without_a_pause_do_not_put_laying_out_off_for_ever(monkeypatch):
    monkeypatch.setattr(order_queue, "_AT_LATEST_S", 0.0)
    host = Host(waiting=5)
    orders = OrderQueue(host)
    for order in range(4):
        orders.put(order)
    assert [orders.take() for _ in range(4)] == [0, 1, 2, 3]
    assert host.done == ["lay out"] * 4  # one before each order


def test_a_host_with_nothing_to_lay_out_gets_its_orders(take_later):
    host = Host()
    orders = OrderQueue(host)
    taken, thread = take_later(orders)
    assert host.laid_out.wait(timeout=PATIENCE_S)
    orders.put(7)
    thread.join(timeout=PATIENCE_S)
    assert taken == [7]
    assert host.done == []
