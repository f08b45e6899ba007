"""Order and fairness of prefill and decode."""

from dataclasses import dataclass
from itertools import pairwise

from moeless.engines.transformers.generation.scheduler import DecodeStep, PrefillStep, Scheduler


@dataclass(eq=False)
class Item:
    prompt_tokens: int


def run_step(scheduler):
    step = scheduler.next_step()
    if isinstance(step, PrefillStep):
        for piece in step.pieces:
            if piece.is_last:
                scheduler.start_running(piece.sequence)
    return step


def test_there_is_nothing_to_do_at_first():
    assert Scheduler(max_batch_size=2, prefill_chunk_tokens=8).next_step() is None


def test_a_long_prompt_is_cut_into_chunks_that_cover_it_once():
    scheduler = Scheduler(max_batch_size=2, prefill_chunk_tokens=8)
    scheduler.add(Item(19))
    steps = [run_step(scheduler) for _ in range(3)]
    assert [(p.start, p.stop, p.is_last) for step in steps for p in step.pieces] == [
        (0, 8, False),
        (8, 16, False),
        (16, 19, True),
    ]
    assert isinstance(run_step(scheduler), DecodeStep)


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt():
    scheduler = Scheduler(max_batch_size=4, prefill_chunk_tokens=8)
    scheduler.add(Item(1))
    run_step(scheduler)
    assert isinstance(run_step(scheduler), DecodeStep) or scheduler.running
    scheduler.add(Item(80))
    kinds = [type(run_step(scheduler)) for _ in range(20)]
    for first, second in pairwise(kinds):
        assert DecodeStep in (first, second)
    assert kinds.count(PrefillStep) == 10


def test_short_prompts_join_several_at_a_time_but_not_without_end():
    scheduler = Scheduler(max_batch_size=100, prefill_chunk_tokens=8)
    for _ in range(20):
        scheduler.add(Item(1))
    kinds = [type(run_step(scheduler)) for _ in range(10)]
    assert kinds[:8] == [PrefillStep] * 8
    assert kinds[8] is DecodeStep


def test_no_more_sequences_are_taken_than_the_batch_holds():
    scheduler = Scheduler(max_batch_size=2, prefill_chunk_tokens=64)
    first, second, third = Item(3), Item(3), Item(3)
    for item in (first, second, third):
        scheduler.add(item)
    for _ in range(6):
        run_step(scheduler)
    assert scheduler.running == [first, second]
    assert list(scheduler.waiting) == [third]
    assert scheduler.remove(first) == 0
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.running == [second, third]


def test_the_last_row_fills_the_hole_that_a_removed_row_leaves():
    scheduler = Scheduler(max_batch_size=4, prefill_chunk_tokens=64)
    items = [Item(1) for _ in range(4)]
    for item in items:
        scheduler.add(item)
        run_step(scheduler)
    assert scheduler.remove(items[1]) == 1
    assert scheduler.running == [items[0], items[3], items[2]]
    assert scheduler.remove(items[2]) == 2
    assert scheduler.running == [items[0], items[3]]


def test_waiting_prefilling_and_unknown_sequences_can_be_removed():
    scheduler = Scheduler(max_batch_size=4, prefill_chunk_tokens=4)
    prefilling, waiting = Item(9), Item(9)
    scheduler.add(prefilling)
    scheduler.add(waiting)
    scheduler.next_step()
    assert scheduler.remove(prefilling) is None
    assert scheduler.remove(waiting) is None
    assert scheduler.remove(Item(1)) is None
    assert scheduler.next_step() is None


def test_a_prompt_that_follows_a_cancelled_one_starts_at_its_beginning():
    scheduler = Scheduler(max_batch_size=4, prefill_chunk_tokens=4)
    first, second = Item(9), Item(6)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.next_step()
    scheduler.remove(first)
    (piece,) = scheduler.next_step().pieces
    assert (piece.sequence, piece.start, piece.stop) == (second, 0, 4)


def test_short_prompts_share_a_step_as_long_as_they_fit_whole():
    scheduler = Scheduler(max_batch_size=10, prefill_chunk_tokens=8, pack_prompts=True)
    items = [Item(length) for length in (3, 2, 3, 1, 20, 2, 2)]
    for item in items:
        scheduler.add(item)
    steps = []
    while len(scheduler.running) < len(items):
        step = run_step(scheduler)
        if isinstance(step, PrefillStep):
            steps.append([(items.index(piece.sequence), piece.stop) for piece in step.pieces])
    assert steps == [
        [(0, 3), (1, 2), (2, 3)],
        [(3, 1)],
        [(4, 8)],
        [(4, 16)],
        [(4, 20)],
        [(5, 2), (6, 2)],
    ]


def test_a_pack_takes_no_more_prompts_than_the_batch_has_room_for():
    scheduler = Scheduler(max_batch_size=2, prefill_chunk_tokens=80, pack_prompts=True)
    for _ in range(5):
        scheduler.add(Item(1))
    assert len(run_step(scheduler).pieces) == 2
    assert isinstance(run_step(scheduler), DecodeStep)
