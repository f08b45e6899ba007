"""Experts that are read into one block are those that are read into memory of their own."""

import os

import pytest
import torch
from store_checkpoints import open_store, save

from families import FAMILIES, make_tiny
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
def test_what_is_expected_is_what_is_read(family, original, tmp_path, monkeypatch):
    store = open_store(save(FAMILIES[family](), tmp_path, original=original))
    expected, read, real = [], [], os.preadv
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, *range_: expected.append(range_[:2]))

    def note(fd, buffers, offset):
        read.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    for expert in (0, 3):
        store.expect(0, expert)
        store.load(0, expert)
    covered = [(begin, begin + count) for begin, count in expected]
    assert sum(n for _, n in expected) == sum(n for _, n in read)
    assert all(any(a <= o and o + n <= b for a, b in covered) for o, n in read)


def test_an_expert_of_a_file_that_is_gone_may_be_expected(tmp_path):
    store = open_store(save(make_tiny("mixtral"), tmp_path, original=True))
    (tmp_path / "model.safetensors").unlink()
    store.expect(0, 0)


def test_without_memory_for_a_block_what_is_taken_is_fresh(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("moeless.functions.store.read_memory.mmap.mmap", refuse)
    memory = ReadMemory()
    for _ in range(3):
        memory.begin()
        assert memory.take((4, 8), torch.float32).shape == (4, 8)
