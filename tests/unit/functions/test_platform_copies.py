"""Plans with several copies of an expert on a device: one instance, whatever the number."""

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.copies import copies_held_ED
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.plan import Plan
from moeless.functions.accounts.billing import GB
from moeless.functions.links.board import Board
from moeless.functions.platform.demands import DemandDesk
from moeless.functions.platform.need_order import NeedOrder
from moeless.functions.platform.platform import Platform
from moeless.functions.sharing.shares import Shares
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES = 100


class Host:
    def __init__(self):
        self.loads = []
        self.evictions = []

    def load(self, function):
        self.loads.append(function.expert)

    def evict(self, function, *, reason):
        self.evictions.append((function.expert, reason))


class Parts:
    """Two experts in one layer on two devices."""

    def __init__(self, *, slots=3):
        self.clock = ManualClock(0.0)
        self.platform = Platform(
            [slots * BYTES] * 2,
            clock=self.clock,
            keep_alive=FixedKeepAlive(1e9),
            sink=MemorySink(),
        )
        spec = ModelSpec(
            model_id="m",
            family="mixtral",
            layer_ids=(0,),
            num_experts=2,
            top_k=1,
            expert=ExpertShape(hidden=1, intermediate=1),
        )
        self.board = Board.in_process(num_layers=1, num_experts=2, num_devices=2)
        self.model = self.platform.add_model(spec, function_bytes=BYTES, board=self.board)
        self.model.join(0, self.board)
        self.hosts = [Host(), Host()]
        for device, host in enumerate(self.hosts):
            self.platform.device_up(device, host)

    def apply(self, replicas_ED, *, release=True):
        plan = Plan(
            step=1,
            layer=0,
            replicas_ED=np.array(replicas_ED, dtype=np.uint8),
            load_E=np.ones(2),
            release=release,
        )
        diff = self.model.apply(plan, decision_s=0.0)
        for device, host in enumerate(self.hosts):
            while host.loads:
                self.platform.loaded(device, self.model.function(0, host.loads.pop(0)))
        return diff


def test_copies_on_one_device_are_one_load_and_one_instance():
    parts = Parts()
    diff = parts.apply([[2, 1], [1, 2]])
    assert sorted(diff.start) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert parts.board.warm_LED.tolist() == [[[1, 1], [1, 1]]]
    assert parts.board.planned_LED.tolist() == [[[2, 1], [1, 2]]]
    assert parts.model.planned_ED(0).tolist() == [[2, 1], [1, 2]]
    assert parts.model.alive_ED(0).tolist() == [[1, 1], [1, 1]]
    assert parts.model.cold_starts_L.tolist() == [4]


def test_another_number_of_copies_loads_and_retires_nothing_but_is_in_force():
    parts = Parts()
    parts.apply([[1, 1], [1, 1]])
    diff = parts.apply([[3, 1], [1, 2]])
    assert (diff.start, diff.retire, diff.kept) == ((), (), 4)
    assert parts.board.planned_LED.tolist() == [[[3, 1], [1, 2]]]
    again = parts.apply([[3, 1], [1, 2]])
    assert (again.start, again.retire, again.kept) == ((), (), 4)


def test_what_a_plan_with_copies_no_longer_contains_is_released():
    parts = Parts()
    parts.apply([[2, 1], [1, 2]])
    diff = parts.apply([[2, 0], [0, 2]])
    assert sorted(diff.retire) == [(0, 1), (1, 0)]
    assert [host.evictions for host in parts.hosts] == [[(1, "released")], [(0, "released")]]


def test_memory_and_time_count_instances():
    parts = Parts()
    parts.apply([[3, 0], [0, 3]])
    parts.clock.advance(10.0)
    report = parts.model.report()
    assert report["resident_bytes_D"] == [BYTES, BYTES]
    assert report["gb_s_L"]["resident"] == pytest.approx([2 * BYTES * 10.0 / GB])


def test_more_copies_do_not_make_an_instance_worth_more():
    parts = Parts()
    parts.apply([[2, 0], [1, 1]])
    few, many = (parts.platform.pools[0].instance(parts.model.function(0, e)) for e in (1, 0))
    models, pools = parts.platform.models, parts.platform.pools
    shares = Shares(models, pools)
    waiters = DemandDesk(models, pools, returning=(), shares=shares)
    order = NeedOrder(models, waiters=waiters, shares=shares)
    assert order.worth(few)[0] == order.worth(many)[0] == 1.0


def test_copies_held_are_those_planned_where_warm_and_one_where_not_planned():
    warm = np.array([[1, 1, 0], [1, 0, 1]], dtype=np.uint8)
    planned = np.array([[2, 0, 3], [1, 1, 255]], dtype=np.uint8)
    expected = [[2, 1, 0], [1, 0, 255]]
    for held in (warm, warm.astype(bool)):
        copies = copies_held_ED(held, planned)
        assert copies.dtype == np.uint8
        assert copies.tolist() == expected
