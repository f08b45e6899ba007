"""A reader of a board finds what was there before, after or during what was being done."""

import numpy as np
import pytest

from moeless.functions.links.board import Board
from moeless.simulator.board_history import BoardHistory


@pytest.fixture
def board():
    board = Board.in_process(num_layers=1, num_experts=2, num_devices=1)
    board.warm_LED[0, 0, 0] = board.planned_LED[0, 0, 0] = 1
    return board


def found(*experts):
    found_ED = np.zeros((2, 1), dtype=np.bool_)
    found_ED[list(experts)] = True
    return found_ED


def usable(history, *experts):
    return history.may_be_usable(0, found(*experts)).ravel().tolist()


def warm(history, *experts):
    return history.may_be_warm(0, found(*experts)).ravel().tolist()


def test_where_nothing_was_done_there_is_one_possibility(board):
    history = BoardHistory(board)
    assert usable(history, 0) == [True, True]
    assert usable(history) == [False, True]
    assert usable(history, 0, 1) == [True, False]
    assert warm(history, 0) == [True, True]
    assert warm(history, 1) == [False, False]


def test_while_something_is_done_its_parts_are_found_in_any_combination(board):
    history = BoardHistory(board)
    history.note(0)
    board.planned_LED[0, :, 0] = (0, 1)
    board.warm_LED[0, :, 0] = (0, 1)
    for experts in [(0,), (1,), (0, 1), ()]:
        assert usable(history, *experts) == [True, True]


def test_what_was_done_is_found_once_it_is_over(board):
    history = BoardHistory(board)
    history.note(0)
    board.warm_LED[0, 0, 0] = 0
    history.forget_before(0)
    assert warm(history, 0) == warm(history) == [True, True]
    history.forget_before(1)
    assert warm(history, 0) == [False, True]
    assert warm(history) == [True, True]


def test_a_replica_that_becomes_warm_only_to_leave_may_have_been_found(board):
    history = BoardHistory(board)
    history.note(0, warm=(0, 1, 0))
    assert warm(history, 0, 1) == [True, True]
    assert usable(history, 0, 1) == [True, False]  # nobody planned it
    history.forget_before(1)
    assert warm(history, 0, 1) == [True, False]
