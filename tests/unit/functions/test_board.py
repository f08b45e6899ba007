"""The layout of a board: nothing overlaps, everything is aligned, both sides agree."""

from itertools import pairwise

import numpy as np
import pytest

from moeless.functions.links.board import Board, EngineBoard, ModelBoard

SHAPES = [(1, 1, 1), (2, 3, 5), (32, 8, 8), (27, 64, 3), (48, 128, 16)]
NAMES = [*ModelBoard.__annotations__, *EngineBoard.__annotations__]


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("part", [ModelBoard, EngineBoard])
@pytest.mark.parametrize(("layers", "experts", "devices"), SHAPES)
def test_fields_are_aligned_to_cache_lines_and_do_not_overlap(part, layers, experts, devices):
    shape = {"num_layers": layers, "num_experts": experts, "num_devices": devices}
    size = part.num_bytes(**shape)
    board = part(bytearray(size), **shape)
    arrays = sorted((getattr(board, name) for name in part.__annotations__), key=address)
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


def test_engines_share_their_models_board_and_nothing_else():
    shape = {"num_layers": 2, "num_experts": 3, "num_devices": 2}
    shared = bytearray(ModelBoard.num_bytes(**shape))
    one, other = (
        Board(shared, bytearray(EngineBoard.num_bytes(**shape)), **shape) for _ in range(2)
    )
    for value, name in enumerate(NAMES, start=1):
        getattr(one, name)[...] = value
    for value, name in enumerate(NAMES, start=1):
        assert (getattr(other, name) == (value if name in ModelBoard.__annotations__ else 0)).all()


def test_the_platform_sees_what_an_engine_writes_and_the_other_way_round():
    shape = {"num_layers": 2, "num_experts": 3, "num_devices": 2}
    parts = [bytearray(part.num_bytes(**shape)) for part in (ModelBoard, EngineBoard)]
    both = Board(*parts, **shape)
    for part, buffer in zip((ModelBoard, EngineBoard), parts, strict=True):
        for value, name in enumerate(part.__annotations__, start=1):
            getattr(both, name)[...] = value
            assert (getattr(part(buffer, **shape), name) == value).all()


def test_a_new_board_is_all_zeros():
    board = Board.in_process(num_layers=2, num_experts=3, num_devices=2)
    assert not any(np.any(getattr(board, name)) for name in NAMES)


def test_a_buffer_that_is_too_small_is_refused():
    with pytest.raises(AssertionError):
        ModelBoard(bytearray(64), num_layers=2, num_experts=3, num_devices=2)
