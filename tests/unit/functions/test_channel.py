"""Mailboxes and doorbells, inside one process and between two."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from effort import PATIENCE_S
from moeless.functions.links import shared_memory
from moeless.functions.links.channel import (
    ChannelShape,
    Mailbox,
    await_answer,
    hush,
    new_doorbell,
    ring,
)

SHAPE = ChannelShape(max_rows=6, max_assignments=12, hidden=5, dtype="float32", num_experts=7)

WORKER = """
import json, select, sys
import numpy as np
from moeless.functions.links import shared_memory
from moeless.functions.links.channel import ChannelShape, Mailbox, hush, ring

shape = ChannelShape(**json.loads(sys.argv[1]))
region, request_bell, answer_bell = map(int, sys.argv[2:5])
mailbox = Mailbox(shared_memory.attach(region), shape)
poller = select.poll()
poller.register(request_bell, select.POLLIN)
served = 0
while True:
    while mailbox.requested == served:
        poller.poll()
        hush(request_bell)
    served, layer, rows, n = mailbox.request()
    if layer < 0:
        break
    segments = mailbox.segments_n3[:n]
    mailbox.status_n[:n] = segments[:, 0] % 3
    mailbox.answer(served, busy_ns=int(segments.sum()) * 1000 + layer * 100 + rows)
    ring(answer_bell)
"""


@pytest.fixture
def doorbell():
    bell = new_doorbell()
    yield bell
    os.close(bell)


@pytest.fixture
def mailbox():
    return Mailbox(bytearray(SHAPE.mailbox_bytes), SHAPE)


@pytest.mark.parametrize("spin_s", [0.0, 0.0002])
def test_requests_and_answers_pass_between_two_processes(spin_s):
    region = shared_memory.create("test", SHAPE.mailbox_bytes)
    bells = [new_doorbell(), new_doorbell()]
    numbers = [region, *bells]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(SHAPE.to_json()), *map(str, numbers)],
        pass_fds=numbers,
    )
    try:
        mailbox = Mailbox(shared_memory.attach(region), SHAPE)
        generator = np.random.default_rng(0)
        for turn in range(300):
            n = int(generator.integers(0, SHAPE.num_experts + 1))
            segments_n3 = generator.integers(0, 99, size=(n, 3)).astype(np.int32)
            layer, rows = turn % 5, turn % 7
            seq = mailbox.post(layer=layer, rows=rows, segments_n3=segments_n3)
            ring(bells[0])
            assert await_answer(mailbox, seq, bells[1], spin_s=spin_s, timeout_s=PATIENCE_S)
            assert mailbox.status_n[:n].tolist() == (segments_n3[:, 0] % 3).tolist()
            assert mailbox.busy_ns == int(segments_n3.sum()) * 1000 + layer * 100 + rows
        mailbox.post(layer=-1, rows=0, segments_n3=np.empty((0, 3), np.int32))
        ring(bells[0])
        assert worker.wait(timeout=PATIENCE_S) == 0
    finally:
        worker.kill()
        worker.wait()
        for number in numbers:
            os.close(number)


def test_a_request_is_read_as_it_was_written(mailbox):
    segments_n3 = np.array([[3, 0, 4], [6, 4, 12]], dtype=np.int32)
    assert mailbox.post(layer=9, rows=5, segments_n3=segments_n3) == 1
    assert mailbox.request() == (1, 9, 5, 2)
    assert mailbox.segments_n3[:2].tolist() == segments_n3.tolist()
    assert (mailbox.requested, mailbox.has_answered(1)) == (1, False)
    mailbox.answer(1, busy_ns=42)
    assert (mailbox.has_answered(1), mailbox.has_answered(2)) == (True, False)
    assert mailbox.busy_ns == 42


def test_a_mailbox_has_room_for_one_segment_per_expert(mailbox):
    full = np.arange(SHAPE.num_experts * 3, dtype=np.int32).reshape(-1, 3)
    seq = mailbox.post(layer=0, rows=1, segments_n3=full)
    mailbox.status_n[:] = 2
    assert mailbox.segments_n3.tolist() == full.tolist()
    assert mailbox.request() == (seq, 0, 1, SHAPE.num_experts)


@pytest.mark.parametrize("spin_s", [0.0, 0.001])
def test_waiting_ends_without_an_answer_when_time_is_up(mailbox, doorbell, spin_s):
    seq = mailbox.post(layer=0, rows=0, segments_n3=np.empty((0, 3), np.int32))
    assert not await_answer(mailbox, seq, doorbell, spin_s=spin_s, timeout_s=0.01)
    assert not await_answer(mailbox, seq, doorbell, spin_s=spin_s, timeout_s=0.0)


def test_a_ring_without_an_answer_does_not_end_the_wait(mailbox, doorbell):
    seq = mailbox.post(layer=0, rows=0, segments_n3=np.empty((0, 3), np.int32))
    ring(doorbell)
    assert not await_answer(mailbox, seq, doorbell, spin_s=0, timeout_s=0.01)


def test_an_answer_that_is_there_already_needs_neither_time_nor_ring(mailbox, doorbell):
    seq = mailbox.post(layer=0, rows=0, segments_n3=np.empty((0, 3), np.int32))
    mailbox.answer(seq, busy_ns=1)
    assert await_answer(mailbox, seq, doorbell, spin_s=0, timeout_s=0.0)


def test_an_older_answer_is_not_taken_for_the_one_awaited(mailbox, doorbell):
    none = np.empty((0, 3), np.int32)
    first = mailbox.post(layer=0, rows=0, segments_n3=none)
    mailbox.answer(first, busy_ns=1)
    ring(doorbell)
    second = mailbox.post(layer=0, rows=0, segments_n3=none)
    assert not await_answer(mailbox, second, doorbell, spin_s=0, timeout_s=0.01)
    thread = threading.Thread(target=lambda: (mailbox.answer(second, busy_ns=2), ring(doorbell)))
    thread.start()
    assert await_answer(mailbox, second, doorbell, spin_s=0, timeout_s=PATIENCE_S)
    thread.join()


def test_a_doorbell_remembers_rings_and_hushing_a_silent_one_does_not_block(doorbell):
    ring(doorbell)
    ring(doorbell)
    hush(doorbell)
    hush(doorbell)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(doorbell)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 4096])
def test_parts_of_a_channel_start_on_cache_lines(dtype, rows):
    shape = ChannelShape(
        max_rows=rows, max_assignments=rows * 3, hidden=33, dtype=dtype, num_experts=5
    )
    sizes = (shape.x_bytes, shape.token_bytes, shape.y_bytes, shape.mailbox_bytes)
    assert all(size % 64 == 0 and size > 0 for size in sizes)
    assert shape.payload_bytes == shape.x_bytes + shape.token_bytes + shape.y_bytes
    assert ChannelShape(**shape.to_json()) == shape


def test_a_region_is_zero_has_no_name_and_outlives_its_descriptor():
    number = shared_memory.create("nameless", 5000)
    one, other = shared_memory.attach(number), shared_memory.attach(number)
    os.close(number)
    assert one[:] == bytes(5000)
    one[17] = 5
    assert other[17] == 5
    assert not [path for path in Path("/dev/shm").iterdir() if "nameless" in path.name]
