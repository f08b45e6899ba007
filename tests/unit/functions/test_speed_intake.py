"""From engines' boards to the speeds that plans are made for."""

import logging

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.planning.device_view import DeviceView
from moeless.functions.platform.platform import Platform
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

SHAPE = {"num_layers": 2, "num_experts": 2, "num_devices": 3}
SLOW = [1.0, 1.0, 0.25]
EQUAL = [1.0, 1.0, 1.0]


def spec(name):
    return ModelSpec(
        model_id=name,
        family="mixtral",
        layer_ids=(0, 1),
        num_experts=2,
        top_k=1,
        expert=ExpertShape(hidden=1, intermediate=1),
    )


class Pool:
    """A platform whose engines say what they are told to, four times a second."""

    def __init__(self):
        self.clock = ManualClock(1.0)
        self.platform = Platform(
            [100, 100, 100],
            clock=self.clock,
            keep_alive=FixedKeepAlive(1e9),
            sink=MemorySink(),
        )
        self.engines = {}

    def add(self, engine, *, model="m"):
        placement = self.platform.models.get(model)
        board = Board.in_process(**SHAPE)
        if placement is None:
            placement = self.platform.add_model(spec(model), function_bytes=10, board=board)
        self.platform.join(placement, engine, board)
        self.engines[engine] = board
        return placement

    def say(self, said, *, seconds=30.0):
        changes = 0
        for _ in range(int(4 * seconds)):
            self.clock.advance(0.25)
            for engine, speeds in said.items():
                self.engines[engine].step[0] += 1
                self.engines[engine].post_speeds(np.array(speeds))
            changes += self.platform.speeds.take()
        return changes


@pytest.fixture
def pool():
    return Pool()


def test_without_a_slow_device_plans_are_told_nothing(pool):
    model = pool.add(0)
    assert pool.say({0: EQUAL}) == 0
    assert model.speed_D() is None


def test_plans_are_told_of_a_slow_device_and_of_its_recovery(pool, caplog):
    model = pool.add(0)
    caplog.set_level(logging.WARNING)
    assert pool.say({0: SLOW}) == 1
    assert model.speed_D().tolist() == SLOW
    assert pool.say({0: EQUAL}) == 1
    assert model.speed_D() is None
    assert [record.getMessage() for record in caplog.records] == [
        "device 2 computes at about 1/4 of the others' speed; plans heed that",
        "device 2 is as fast as the others again",
    ]


def test_a_planner_of_some_devices_is_told_their_speeds(pool):
    model = pool.add(0)
    pool.say({0: SLOW})
    assert DeviceView(model, (1, 2)).speed_D().tolist() == [1.0, 0.25]
    assert DeviceView(model, (0, 2)).speed_D().tolist() == [1.0, 0.25]
    assert DeviceView(model, (0, 1)).speed_D() is None


def test_what_an_engine_of_one_model_measures_counts_for_all_models(pool):
    pool.add(0, model="one")
    other = pool.add(1, model="other")
    pool.say({0: SLOW})
    assert other.speed_D().tolist() == SLOW


def test_an_engine_without_work_or_that_measures_nothing_has_no_say(pool):
    model = pool.add(0)
    pool.add(1)
    pool.add(2)
    pool.engines[1].post_speeds(np.array(EQUAL))  # it has stood still since
    pool.clock.advance(60.0)
    pool.say({0: SLOW})
    assert model.speed_D().tolist() == SLOW


def test_what_is_being_written_is_not_read(pool):
    board = Board.in_process(**SHAPE)
    assert board.read_speeds() is None
    board.post_speeds(np.array(SLOW))
    assert board.read_speeds().tolist() == SLOW
    board.speed_note[0] = -1 - board.speed_note[0]
    assert board.read_speeds() is None


def test_a_plan_that_was_to_stand_is_looked_at_again(pool):
    model = pool.add(0)
    board = pool.engines[0]
    pool.say({0: EQUAL})
    board.plan_step_L[:] = 10_000
    pool.say({0: SLOW})
    assert (board.plan_step_L <= board.step[0]).all()
    assert model.speed_D() is not None


def test_a_device_that_leaves_is_not_slow_any_more(pool):
    model = pool.add(0)
    pool.say({0: SLOW})
    pool.platform.set_budget(2, 0)
    assert pool.say({0: [1.0, 1.0, 0.0]}, seconds=0.25) == 1
    assert model.speed_D() is None
