"""Tokens that were computed together come apart into conversations."""

import numpy as np
import pytest

from moeless.workloads.recording.conversations import ConversationLedger, row_dtype
from moeless.workloads.recording.ledgers import RecordedStep, RoutedShape

SHAPE = RoutedShape(num_layers=2, num_experts=5, top_k=2)
HIDDEN = 3
DTYPE = row_dtype(SHAPE, HIDDEN, {"gate_input": "int16"})


class Taker:
    """Keeps conversations and has room for so many bytes."""

    def __init__(self, room_bytes=None):
        self.taken = {}
        self.room_bytes = room_bytes
        self.most_bytes = 0

    def room_tokens(self, *, besides_bytes):
        if self.room_bytes is None:
            return None
        used = sum(rows.nbytes for rows in self.taken.values())
        return max(0, self.room_bytes - used - besides_bytes) // DTYPE.itemsize

    def take(self, number, pieces):
        self.taken[number] = np.concatenate(list(pieces))


@pytest.fixture
def make(tmp_path):
    made = []

    def make(*, max_tokens=None, room_bytes=None):
        taker = Taker(room_bytes)
        made.append(
            ConversationLedger(
                DTYPE, folder=tmp_path, number_of=int, taker=taker, max_tokens=max_tokens
            )
        )
        return made[-1], taker

    yield make
    for ledger in made:
        ledger.close()
    assert list(tmp_path.iterdir()) == [], "a temporary file was left behind"


def step(*parts):
    """A step whose states and experts say which request and position a row is of."""
    rows = [(int(who), start + i) for who, _, tokens, start, _ in parts for i in range(tokens)]
    states = np.array([[[100 * who + at] * HIDDEN] * SHAPE.num_layers for who, at in rows])
    ids = np.array([[[who % 5, at % 5]] * SHAPE.num_layers for who, at in rows])
    return RecordedStep(
        parts=parts,
        at_s=0.0,
        ids_TLK=ids.astype(np.int16),
        states_TLH={"gate_input": states.astype(np.int16)},
    )


def prefill(who, tokens, start=0):
    return (who, "prefill", tokens, start, tuple(range(start + 10, start + 10 + tokens)))


def decode(who, start):
    return (who, "decode", 1, start, (start + 10,))


def test_each_conversation_gets_its_rows_in_order(make):
    ledger, taker = make()
    ledger.add(step(prefill("1", 3)))
    ledger.add(step(prefill("2", 2), prefill("3", 1)))
    ledger.add(step(decode("1", 3), decode("2", 2)))
    ledger.add(step(decode("1", 4)))
    for who in ("1", "2"):
        ledger.finish(who)
    ledger.finish("9")  # never had a token computed
    assert sorted(taker.taken) == [1, 2], "what is not complete leaves nothing"
    rows = taker.taken[1]
    assert rows["position"].tolist() == [0, 1, 2, 3, 4]
    assert rows["token_ids"].tolist() == [10, 11, 12, 13, 14]
    assert rows["decode"].tolist() == [0, 0, 0, 1, 1]
    assert rows["gate_input"][:, 1, 2].tolist() == [100, 101, 102, 103, 104]
    assert rows["topk_ids"][:, 0].tolist() == [[1, at] for at in range(5)]
    assert taker.taken[2]["gate_input"][:, 0, 0].tolist() == [200, 201, 202]
    assert ledger.tokens == 9


def test_a_bound_of_tokens_is_met_exactly_and_open_conversations_count(make):
    ledger, taker = make(max_tokens=7)
    ledger.add(step(prefill("1", 3), prefill("2", 2)))
    assert not ledger.is_full
    ledger.add(step(prefill("3", 4)))
    assert ledger.is_full
    ledger.add(step(decode("1", 3)))
    ledger.finish("1")
    ledger.finish_open()
    assert {number: len(rows) for number, rows in taker.taken.items()} == {1: 3, 2: 2, 3: 2}
    assert not ledger.ran_out_of_disk


def test_nothing_is_taken_when_there_was_enough_before(make):
    ledger, taker = make(max_tokens=0)
    assert ledger.is_full
    ledger.add(step(prefill("1", 3)))
    ledger.finish("1")
    assert taker.taken == {}


def test_a_bound_of_bytes_holds_while_conversations_are_handed_on(make):
    ledger, taker = make(room_bytes=40 * DTYPE.itemsize)
    number = 0
    while not ledger.is_full:
        ledger.add(step(prefill(str(number), 6), prefill(str(number + 1), 3)))
        held = sum(len(spool) for spool in ledger._open.values())
        taken = sum(len(rows) for rows in taker.taken.values())
        longest = max(len(spool) for spool in ledger._open.values())
        assert taken + held + longest <= 40
        ledger.finish(str(number))
        ledger.finish(str(number + 1))
        number += 2
    assert ledger.ran_out_of_disk
    assert 20 < sum(len(rows) for rows in taker.taken.values()) <= 40
