"""Helpers take tasks of the same list; who does not wake in time is not waited for."""

import ctypes
import threading

import numpy as np
import pytest
from numba import carray, cfunc, types

from moeless.functions.compute import team
from moeless.functions.compute.team import run_together
from moeless.functions.compute.tiles import fetch_add


@cfunc(types.void(types.CPointer(types.int64)))
def count_up(pointer):
    """Take tasks until there are none; each is counted once, with some work behind it."""
    words = carray(pointer, (3,))
    while True:
        task = fetch_add(words[2], 1)
        if task >= words[1]:
            break
        done = carray(pointer, (3 + words[1],))
        total = 0
        for i in range(200):
            total += i * task % 7
        done[3 + task] += 1 + (total < 0)


def run(tasks, threads):
    words = np.zeros(3 + tasks, dtype=np.int64)
    words[1], words[2] = tasks, words.ctypes.data
    run_together(count_up.address, words.ctypes.data, threads)
    return words[3:]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_task_is_done_once_whoever_helps(threads):
    for tasks in [1, 2, 7, 100, 1000] * 50:
        assert (run(tasks, threads) == 1).all()


def test_a_helper_that_sleeps_is_woken_by_the_next_work():
    run(10, 2)
    (helper, *_) = team._team.helpers
    for _ in range(20):
        while not helper._words[team._ASLEEP]:
            pass  # it looks for work for a moment only
        assert (run(50, 2) == 1).all()


def test_several_threads_each_have_helpers_of_their_own():
    failures = []

    def work():
        try:
            for _ in range(100):
                assert (run(64, 2) == 1).all()
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_helper_that_never_comes_leaves_all_to_the_caller():
    class Absent:
        def __init__(self):
            self.memory = np.zeros(team._WORDS, dtype=np.int64)
            self.address = self.memory.ctypes.data

    absent = Absent()
    words = np.array([1, 0, 0, absent.address])
    lead = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(team._code()[1].address)
    for tasks in (1, 30, 500):
        counted = np.zeros(3 + tasks, dtype=np.int64)
        counted[1], counted[2] = tasks, counted.ctypes.data
        words[1], words[2] = count_up.address, counted.ctypes.data
        lead(words.ctypes.data)
        assert (counted[3:] == 1).all()


def test_the_size_of_a_team_is_torchs_number_unless_it_is_set():
    sizes = []

    def look():
        before = team.team_size()
        team.set_team_size(before + 3)
        sizes.append((before, team.team_size()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    ((before, after),) = sizes
    assert after == before + 3
    assert team.team_size() == before
