"""Experts that are read into one block are those that are read into memory of their own."""

import os

import pytest
import torch
from store_checkpoints import open_store, save

from families import FAMILIES, make_tiny
from moeless.functions.store import shard
from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.store.read_memory import ReadMemory

CASES = [(name, original) for name in sorted(FAMILIES) for original in (True, False)]


@pytest.mark.parametrize(("family", "original"), CASES)
def test_one_block_for_all_experts_holds_each_in_turn(family, original, tmp_path):
    store = open_store(save(FAMILIES[family](), tmp_path, original=original))
    memory = ReadMemory()
    for expert in range(store.spec.num_experts):
        own, read = store.load(0, expert), store.load(0, expert, memory=memory)
        assert torch.equal(own.gate_up, read.gate_up)
        for a, b in zip(own.tensors(), read.tensors(), strict=True):
            assert torch.equal(a, b)
            assert b.is_contiguous()
            assert b.dtype == a.dtype


@pytest.mark.parametrize(("family", "original"), CASES)
def test_a_load_takes_no_more_than_was_said_beforehand(family, original, tmp_path):
    store = open_store(save(FAMILIES[family](), tmp_path, original=original))
    memory = ReadMemory()
    store.load(0, 0, memory=memory)
    assert store.bytes_of_function <= memory.needed_bytes
    # Small tensors are rounded up to cache lines.
    assert memory.needed_bytes <= store.load_bytes + 64 * 8
    if memory.needed_bytes <= store.bytes_of_function + 64 * 8:
        assert store.load_bytes == store.bytes_of_function


def test_gate_and_up_are_joined_without_a_copy_from_the_second_expert_on(tmp_path):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    memory = ReadMemory()
    store.load(0, 0, memory=memory)
    weights = store.load(0, 1, memory=memory)
    assert weights.gate_up.data_ptr() == weights.gate.data_ptr()
    again = store.load(0, 2, memory=memory)
    assert again.gate.data_ptr() == weights.gate.data_ptr()


def test_a_released_block_is_made_anew(tmp_path):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    memory = ReadMemory()
    for _ in range(2):
        store.load(0, 0, memory=memory)
    memory.release()
    for expert in (1, 2, 3):
        assert torch.equal(store.load(0, expert, memory=memory).down, store.load(0, expert).down)


def test_matrices_of_one_storage_that_are_apart_are_joined_by_a_copy():
    both = torch.arange(12.0).view(3, 4)
    weights = ExpertWeights(gate=both[2:], up=both[:1], down=torch.zeros(4, 1))
    assert torch.equal(weights.gate_up, torch.cat([both[2:], both[:1]]))


@pytest.mark.parametrize(("family", "original"), CASES)
def test_what_is_fetched_is_what_is_read(family, original, tmp_path, monkeypatch):
    store = open_store(save(FAMILIES[family](), tmp_path, original=original))
    fetched, read, real = [], [], os.preadv

    def note(kept):
        def preadv(fd, buffers, offset, *flags):
            if len(buffers[0]) > 1:  # else it only asks whether the page is there
                kept.append((offset, offset + len(buffers[0])))
            return real(fd, buffers, offset)

        return preadv

    monkeypatch.setattr(shard, "_is_cached", lambda *_: False)
    for expert in (0, 3):
        monkeypatch.setattr(os, "preadv", note(fetched))
        store.fetch(0, expert)
        monkeypatch.setattr(os, "preadv", note(read))
        store.load(0, expert)
    assert sum(b - a for a, b in fetched) == sum(b - a for a, b in read)
    assert all(any(a <= c and d <= b for a, b in fetched) for c, d in read)


def test_an_expert_is_fetched_in_one_piece_where_it_lies_in_one(tmp_path, monkeypatch):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    ranges = []
    monkeypatch.setattr(shard.Shard, "fetch", lambda _self, *range_: ranges.append(range_[:2]))
    store.fetch(1, 2)
    ((begin, end),) = ranges
    assert end - begin == store.bytes_of_function


def test_what_is_in_memory_is_not_read_again(tmp_path, monkeypatch):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    monkeypatch.setattr(shard, "_is_cached", lambda *_: True)
    monkeypatch.setattr(os, "preadv", None)
    store.fetch(1, 2)


def test_an_expert_of_a_file_that_is_gone_may_be_fetched(tmp_path):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    (tmp_path / "model.safetensors").unlink()
    store.fetch(0, 0)


def test_without_memory_for_a_block_what_is_taken_is_fresh(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("moeless.functions.store.read_memory.mmap.mmap", refuse)
    memory = ReadMemory()
    for _ in range(3):
        memory.begin()
        assert memory.take((4, 8), torch.float32).shape == (4, 8)


def test_experts_that_lie_one_behind_the_other_are_expected_in_one_piece(tmp_path, monkeypatch):
    store = open_store(save(make_tiny("gpt_oss"), tmp_path, original=True))
    advised, read, real = [], [], os.preadv
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, *range_: advised.append(range_))
    store.expect(0, [1, 2])

    def preadv(fd, buffers, offset):
        read.append((offset, offset + len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    for expert in (1, 2):
        store.load(0, expert)
    pieces = [(begin, begin + size) for begin, size, _advice in advised]
    assert len(pieces) == len(read) // 2
    assert all(any(a <= c and d <= b for a, b in pieces) for c, d in read)


def test_experts_of_a_file_that_is_gone_may_be_expected(tmp_path):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    store.load(0, 0)
    (tmp_path / "model.safetensors").unlink()
    store.expect(0, [0, 1])
    store.close()
    store.expect(0, [0, 1])
