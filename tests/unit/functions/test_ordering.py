"""What is handed over through shared memory lies between fences, on processors that need them."""

import threading

import numpy as np
import pytest

from moeless.core.processor import describe_processor
from moeless.functions.links import ordering
from moeless.functions.links.board import Board
from moeless.functions.links.channel import ChannelShape, Mailbox
from moeless.functions.links.ordering import lock_fence, new_fence

SHAPE = ChannelShape(max_rows=6, max_assignments=12, hidden=5, dtype="float32", num_experts=7)
SEGMENTS_N3 = np.array([[3, 0, 4], [6, 4, 12]], dtype=np.int32)


@pytest.fixture(params=["x86_64", "aarch64", "x86_64 without its order"])
def needs_fences(request, monkeypatch):
    """The kind of processor that we seem to run on; returns whether it needs fences."""
    machine, _, without = request.param.partition(" ")
    environment = {"MOELESS_WITHOUT": "ordered-memory"} if without else {}
    processor = describe_processor(machine=machine, flags=frozenset(), environment=environment)
    monkeypatch.setattr(ordering, "this_processor", lambda: processor)
    return request.param != "x86_64"


class Watch:
    """A fence that notes what memory looks like when it is passed."""

    def __init__(self, look):
        self._look = look
        self.seen = []

    def __call__(self):
        self.seen.append(self._look())

    def take(self):
        seen, self.seen = self.seen, []
        return seen


def test_a_processor_that_keeps_order_pays_for_no_fence_and_others_have_one(needs_fences):
    assert (new_fence() is not None) == needs_fences
    assert (Mailbox(bytearray(SHAPE.mailbox_bytes), SHAPE)._fence is not None) == needs_fences
    board = Board.in_process(num_layers=1, num_experts=2, num_devices=1)
    assert (board.fence is not None) == needs_fences


def test_a_fence_of_one_thread_waits_for_no_other(monkeypatch):
    first, second = lock_fence(), lock_fence()
    held = threading.Lock()
    with held:
        threads = [threading.Thread(target=fence) for fence in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()


@pytest.fixture
def sides(monkeypatch):
    """Both sides of a mailbox, and the fence that each passes."""
    region = bytearray(SHAPE.mailbox_bytes)
    words = memoryview(region).cast("q")
    fences = []

    def make():
        fences.append(Watch(lambda: words[:6].tolist()))
        return fences[-1]

    monkeypatch.setattr("moeless.functions.links.channel.new_fence", make)
    return Mailbox(region, SHAPE), Mailbox(region, SHAPE), *fences


def test_a_request_is_whole_before_its_number_is_seen_and_read_after_it(sides):
    engine, worker, engine_fence, worker_fence = sides
    for turn in (1, 2):
        engine.post(layer=9, rows=5, segments_n3=SEGMENTS_N3[:turn])
        assert engine_fence.take() == [[turn - 1, 0, 9, 5, turn, 0]]
        assert worker.requested == turn
        assert worker_fence.take() == []  # nothing is read as yet
        worker.request()
        assert worker_fence.take() == [[turn, 0, 9, 5, turn, 0]]


def test_an_answer_is_whole_before_its_number_is_seen_and_read_after_it(sides):
    engine, worker, engine_fence, worker_fence = sides
    seq = engine.post(layer=0, rows=1, segments_n3=SEGMENTS_N3[:1])
    engine_fence.take()
    assert not engine.has_answered(seq)
    assert engine_fence.take() == []
    worker.answer(seq, busy_ns=77)
    assert worker_fence.take() == [[1, 0, 0, 1, 1, 77]]
    assert engine.has_answered(seq)
    assert engine_fence.take() == [[1, 1, 0, 1, 1, 77]]


@pytest.fixture
def board():
    return Board.in_process(num_layers=2, num_experts=3, num_devices=2)


def writers(board):
    """What is written between marks: how, the mark and the value."""
    return [
        (
            lambda step: board.post_forecast(1, np.full(3, step), error=0.5, step=step),
            lambda: int(board.forecast_step_L[1]),
            lambda: float(board.forecast_LE[1, 2]),
        ),
        (
            lambda step: board.post_actual(1, np.full(3, step), step=step),
            lambda: int(board.actual_step_L[1]),
            lambda: float(board.actual_LE[1, 2]),
        ),
        (
            lambda step: board.post_speeds(np.full(2, step)),
            lambda: int(board.speed_note[0]),
            lambda: float(board.speed_D[1]),
        ),
        (
            lambda step: board.post_used(1, np.ones((3, 2), bool), at_ns=step, step=step),
            lambda: int(board.used_step_L[1]),
            lambda: int(board.used_ns_LED[1, 2, 1]),
        ),
    ]


@pytest.mark.parametrize("which", range(4))
def test_what_a_board_marks_is_marked_before_it_is_written_and_unmarked_after(board, which):
    write, mark, value = writers(board)[which]
    board.fence = Watch(lambda: (mark() > 0, value()))
    write(1)
    write(2)
    assert board.fence.take() == [(False, 0), (False, 1), (False, 1), (False, 2)]
    assert (mark(), value()) == (2, 2)


def test_a_reader_passes_a_fence_after_the_first_look_at_a_mark_and_before_the_second(board):
    board.post_actual(0, np.array([1, 2, 3]), step=4)
    marks = []
    board.fence = Watch(lambda: marks.append(int(board.actual_step_L[0])))
    step, (load_E,) = board.read_marked(board.actual_step_L, 0, board.actual_LE)
    assert (step, load_E.tolist(), marks) == (4, [1, 2, 3], [4, 4])


@pytest.mark.parametrize("later", [0, 5])
def test_what_changes_while_it_is_read_is_not_taken(board, later):
    board.post_actual(0, np.array([1, 2, 3]), step=4)
    passed = []

    def change():
        passed.append(len(passed))
        if len(passed) == 1:
            board.actual_step_L[0] = later

    board.fence = change
    assert board.read_marked(board.actual_step_L, 0, board.actual_LE) is None


def test_what_is_being_written_is_not_taken(board):
    board.post_actual(0, np.array([1, 2, 3]), step=4)
    board.actual_step_L[0] = 0
    assert board.read_marked(board.actual_step_L, 0, board.actual_LE) is None
