"""Loads go from a board to the control loop once each."""

import numpy as np
import pytest

from moeless.functions.links.board import Board
from moeless.functions.planning.load_intake import LoadIntake


class Consumer:
    adaptive = True

    def __init__(self):
        self.seen = []
        self.errors = []

    def observe(self, *, step, layer, load_E):
        self.seen.append(("observe", step, layer, load_E.tolist()))

    def forecast(self, *, step, layer, load_E, expected_error=None):
        self.seen.append(("forecast", step, layer, load_E.tolist()))
        self.errors.append(expected_error)


@pytest.fixture
def board():
    return Board.in_process(num_layers=3, num_experts=2, num_devices=1)


def put(board, kind, *, step, layer, load):
    getattr(board, f"{kind}_LE")[layer] = load
    getattr(board, f"{kind}_step_L")[layer] = step


def test_forecasts_come_before_loads_that_came_true(board):
    consumer = Consumer()
    intake = LoadIntake(board, consumer)
    put(board, "actual", step=1, layer=0, load=[3, 1])
    put(board, "forecast", step=1, layer=1, load=[2, 2])
    intake.take()
    assert consumer.seen == [("forecast", 1, 1, [2, 2]), ("observe", 1, 0, [3, 1])]


def test_the_error_of_a_forecast_comes_with_it_where_it_is_known(board):
    consumer = Consumer()
    intake = LoadIntake(board, consumer)
    for layer, error in enumerate([0.25, np.nan, 0.0]):
        board.forecast_error_L[layer] = error
        put(board, "forecast", step=1, layer=layer, load=[2, 2])
    intake.take()
    assert consumer.errors == [0.25, None, 0.0]


def test_nothing_is_handed_over_twice(board):
    consumer = Consumer()
    intake = LoadIntake(board, consumer)
    intake.take()
    put(board, "actual", step=1, layer=0, load=[3, 1])
    intake.take()
    intake.take()
    assert len(consumer.seen) == 1


def test_only_the_newest_of_several_loads_counts(board):
    consumer = Consumer()
    intake = LoadIntake(board, consumer)
    put(board, "actual", step=1, layer=2, load=[3, 1])
    put(board, "actual", step=2, layer=2, load=[0, 4])
    intake.take()
    assert consumer.seen == [("observe", 2, 2, [0, 4])]


def test_what_the_consumer_got_does_not_change_later(board):
    kept = []

    class Keeper(Consumer):
        def observe(self, *, step, layer, load_E):
            kept.append(load_E)

    intake = LoadIntake(board, Keeper())
    put(board, "actual", step=1, layer=0, load=[3, 1])
    intake.take()
    put(board, "actual", step=2, layer=0, load=[7, 7])
    assert np.array_equal(kept[0], [3, 1])


class Torn(Board):
    """A board on which somebody writes while its loads are read."""

    def meanwhile(self, change):
        self.forecast_LE = self.actual_LE = Interrupted(change)


class Interrupted:
    def __init__(self, change):
        self._change = change

    def __getitem__(self, layer):
        self._change(layer)
        return np.array([1.0, 1.0])


@pytest.mark.parametrize("kind", ["forecast", "actual"])
def test_a_load_that_changes_while_it_is_read_is_taken_once_it_is_complete(kind):
    shape = {"num_layers": 3, "num_experts": 2, "num_devices": 1}
    board = Torn.in_process(**shape)
    step_L, loads_LE = getattr(board, f"{kind}_step_L"), getattr(board, f"{kind}_LE")
    consumer = Consumer()
    intake = LoadIntake(board, consumer)
    put(board, kind, step=1, layer=2, load=[3, 1])
    board.meanwhile(lambda layer: step_L.__setitem__(layer, 0))  # begun
    intake.take()
    board.meanwhile(lambda layer: step_L.__setitem__(layer, 2))  # begun and ended
    step_L[2] = 1
    intake.take()
    assert consumer.seen == []
    setattr(board, f"{kind}_LE", loads_LE)
    loads_LE[2] = [4, 4]
    intake.take()
    assert [seen[1:] for seen in consumer.seen] == [(2, 2, [4, 4])]


def test_a_reader_can_tell_a_forecast_that_is_being_written(board):
    seen = []

    class Load:
        def __array__(self, dtype=None, copy=None):
            seen.append(int(board.forecast_step_L[1]))
            return np.array([2.0, 2.0])

    board.post_forecast(1, Load(), error=0.5, step=7)
    assert seen == [0]
    assert board.forecast_step_L.tolist() == [0, 7, 0]
    board.post_actual(1, np.array([1, 3]), step=7)
    assert board.actual_step_L.tolist() == [0, 7, 0]
    assert board.actual_LE[1].tolist() == [1, 3]
