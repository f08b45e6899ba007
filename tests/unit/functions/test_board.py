"""The layout of a board: nothing overlaps, everything is aligned, both sides agree."""

from itertools import pairwise

import numpy as np
import pytest

from moeless.functions.board import Board

SHAPES = [(1, 1, 1), (2, 3, 5), (32, 8, 8), (27, 64, 3), (48, 128, 16)]
NAMES = list(Board.__annotations__)


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(("layers", "experts", "devices"), SHAPES)
def test_fields_are_aligned_to_cache_lines_and_do_not_overlap(layers, experts, devices):
    shape = {"num_layers": layers, "num_experts": experts, "num_devices": devices}
    size = Board.num_bytes(**shape)
    board = Board(bytearray(size), **shape)
    arrays = sorted((getattr(board, name) for name in NAMES), key=address)
    first = address(arrays[0])
    for one, other in pairwise(arrays):
        assert address(one) + one.nbytes <= address(other)
    assert all((address(array) - first) % 64 == 0 for array in arrays)
    assert address(arrays[-1]) + arrays[-1].nbytes - first <= size


@pytest.mark.parametrize(("layers", "experts", "devices"), SHAPES)
def test_names_tell_the_shapes(layers, experts, devices):
    sizes = {"L": layers, "E": experts, "D": devices}
    board = Board.in_process(num_layers=layers, num_experts=experts, num_devices=devices)
    for name in NAMES:
        suffix = name.rpartition("_")[2]
        axes = suffix if suffix.isupper() else ""
        assert getattr(board, name).shape == (tuple(sizes[a] for a in axes) or (1,))


def test_two_boards_on_one_buffer_see_each_others_values():
    shape = {"num_layers": 2, "num_experts": 3, "num_devices": 2}
    buffer = bytearray(Board.num_bytes(**shape))
    one, other = Board(buffer, **shape), Board(buffer, **shape)
    for value, name in enumerate(NAMES, start=1):
        getattr(one, name)[...] = value
    for value, name in enumerate(NAMES, start=1):
        assert (getattr(other, name) == value).all()


def test_a_new_board_is_all_zeros():
    board = Board.in_process(num_layers=2, num_experts=3, num_devices=2)
    assert not any(np.any(getattr(board, name)) for name in NAMES)


def test_a_buffer_that_is_too_small_is_refused():
    with pytest.raises(AssertionError):
        Board(bytearray(64), num_layers=2, num_experts=3, num_devices=2)
