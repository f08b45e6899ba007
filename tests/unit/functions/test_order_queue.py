"""Orders come in sequence; after a pause what only loads need is given back, once."""

import threading

from effort import PATIENCE_S
from moeless.functions.host.order_queue import OrderQueue


class Host:
    def __init__(self):
        self.rests = 0
        self.rested = threading.Event()

    def rest(self):
        self.rests += 1
        self.rested.set()


def test_orders_are_taken_in_sequence():
    host = Host()
    orders = OrderQueue(host)
    for order in range(5):
        orders.put(order)
    assert [orders.take() for _ in range(5)] == list(range(5))
    assert host.rests == 0


def test_a_pause_lets_the_host_rest_once_and_the_next_order_is_taken():
    host = Host()
    orders, taken = OrderQueue(host), []
    thread = threading.Thread(target=lambda: taken.append(orders.take()))
    thread.start()
    assert host.rested.wait(timeout=PATIENCE_S)
    orders.put("load")
    thread.join(timeout=PATIENCE_S)
    assert taken == ["load"]
    assert host.rests == 1
