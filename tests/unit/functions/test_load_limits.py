"""Small loads make one order, within what may be under way."""

import pytest

from moeless.core.clock import ManualClock
from moeless.core.events import InstanceLoaded
from moeless.core.model import ExpertShape, FunctionId, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.load_limits import ONE_BY_ONE, LoadLimits
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES = 100
LAYERS, EXPERTS = 2, 8


class Host:
    """Keeps orders; the test says when they end."""

    def __init__(self):
        self.orders = []

    def load(self, *functions):
        self.orders.append([(function.layer, function.expert) for function in functions])

    def evict(self, function, *, reason):
        self.orders.append((function, reason))


class Parts:
    """One device, and a model whose first layer is about to run."""

    def __init__(self, *, batch_bytes, slots=LAYERS * EXPERTS):
        self.sink = MemorySink()
        self.platform = Platform(
            [slots * BYTES],
            clock=ManualClock(0.0),
            keep_alive=FixedKeepAlive(1e9),
            sink=self.sink,
            limits=LoadLimits(batch_bytes=batch_bytes),
        )
        spec = ModelSpec(
            model_id="m",
            family="mixtral",
            layer_ids=tuple(range(LAYERS)),
            num_experts=EXPERTS,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        self.board = Board.in_process(num_layers=LAYERS, num_experts=EXPERTS, num_devices=1)
        self.model = self.platform.add_model(spec, function_bytes=BYTES, board=self.board)
        self.model.join(0, self.board)
        self.host = Host()
        self.platform.device_up(0, self.host)

    def demand(self, *experts, layer=0):
        self.board.layer[0] = layer
        self.platform.demand(self.model, ticket=1, layer=layer, experts=experts)

    def end(self, *places):
        self.platform.loaded(0, *(self.model.function(*place) for place in places))


def functions(count):
    return [(FunctionId("m", 0, expert), BYTES) for expert in range(count)]


def test_without_batches_each_load_is_an_order_and_two_are_under_way():
    assert [len(batch) for batch in ONE_BY_ONE.batches(functions(3))] == [1, 1, 1]
    assert ONE_BY_ONE.admits(BYTES, under_way=1, under_way_bytes=BYTES)
    assert not ONE_BY_ONE.admits(1, under_way=2, under_way_bytes=2 * BYTES)


def test_batches_hold_as_much_as_one_order_may_and_keep_the_sequence():
    batches = list(LoadLimits(batch_bytes=3 * BYTES + 1).batches(functions(7)))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [each.expert for batch in batches for each in batch] == list(range(7))


def test_a_load_that_is_larger_than_an_order_may_be_is_ordered_by_itself():
    limits = LoadLimits(batch_bytes=BYTES - 1)
    assert [len(batch) for batch in limits.batches(functions(2))] == [1, 1]
    assert limits.admits(BYTES, under_way=1, under_way_bytes=BYTES)
    assert not limits.admits(BYTES, under_way=2, under_way_bytes=2 * BYTES)


@pytest.mark.parametrize(("under_way", "admitted"), [(5, True), (6, False)])
def test_two_orders_are_under_way_not_two_and_a_remainder(under_way, admitted):
    limits = LoadLimits(batch_bytes=3 * BYTES + BYTES // 2)  # seven would fit twice that
    found = limits.admits(BYTES, under_way=under_way, under_way_bytes=under_way * BYTES)
    assert found is admitted


def test_an_order_has_a_limited_number_of_loads_however_small_they_are():
    limits = LoadLimits(batch_bytes=1 << 20)
    assert [len(batch) for batch in limits.batches(functions(100))] == [64, 36]
    assert not limits.admits(1, under_way=128, under_way_bytes=128)


def test_a_report_of_several_ends_is_followed_by_one_order_for_as_many():
    parts = Parts(batch_bytes=2 * BYTES)
    parts.demand(0, 1, 2, 3)
    assert parts.host.orders == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    parts.end((0, 0), (0, 1))
    assert parts.board.warm_LED[0, :, 0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert parts.host.orders[2:] == [[(1, 0), (1, 1)]]
    parts.end((0, 2), (0, 3))
    assert [result.error for result in parts.platform.finished()] == [None]
    loaded = [event for event in parts.sink.events if isinstance(event, InstanceLoaded)]
    assert [event.expert for event in loaded] == [0, 1, 2, 3]


def test_what_tokens_begin_to_wait_for_is_ordered_next():
    parts = Parts(batch_bytes=2 * BYTES)
    parts.demand(0, 1, 2, 3)
    parts.end((0, 0), (0, 1))
    parts.end((0, 2), (0, 3))
    parts.demand(7, layer=1)
    parts.end((1, 0), (1, 1))
    assert parts.host.orders[-1] == [(1, 7)]  # what the gate has not chosen is dropped


def test_a_load_that_fails_leaves_the_others_of_its_order_alone():
    parts = Parts(batch_bytes=4 * BYTES)
    parts.demand(0, 1, 2)
    parts.platform.failed(0, parts.model.function(0, 1), reason="damaged")
    parts.end((0, 0), (0, 2))
    assert parts.board.warm_LED[0, :, 0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    (result,) = parts.platform.finished()
    assert result.error == "layer 0, expert 1: damaged"


def test_nothing_is_evicted_to_have_more_loads_under_way():
    parts = Parts(batch_bytes=4 * BYTES, slots=EXPERTS)
    parts.demand(*range(EXPERTS))
    parts.end(*((0, expert) for expert in range(EXPERTS)))
    parts.host.orders.clear()
    parts.demand(*range(EXPERTS), layer=1)
    evicted = [parts.host.orders.pop(0)[0]]
    assert parts.host.orders == []  # room is made for one after the other, as always
    parts.platform.evicted(0, evicted[0], reason="room")
    assert parts.host.orders[0] == [(1, 0)]
    assert parts.board.warm_LED[0].sum() == EXPERTS - 2


def test_no_more_is_ordered_than_the_budget_holds():
    parts = Parts(batch_bytes=10 * BYTES, slots=EXPERTS)
    parts.demand(*range(EXPERTS))
    assert parts.host.orders == [[(0, expert) for expert in range(EXPERTS)]]
    assert parts.platform.pools[0].held_bytes == EXPERTS * BYTES
