"""Threads that help one to compute: they take tasks of the same list beside it.

OpenMP's are no use to an engine: a process whose main thread has used them, too, has more of them
than there are cores, and then GNU's lets each sleep at once and wakes it for each product, which
takes longer than most products do (docs/log.md). Ours look for work for a moment before they
sleep. Nobody waits for one that has not woken in time: the caller does all tasks itself, and takes
its offer back.

Needs no GIL while it computes. Needs torch, which knows how many threads are wanted.
"""

import ctypes
import itertools
import platform
import threading
from functools import cache
from pathlib import Path
from typing import Any, Final

import numba
import numba.core.cgutils
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moeless.functions.compute.tiles import source_stamp
from moeless.policies.kernels.compiled import compiled_callback

_LOOKS: Final = 20_000
"""How often a helper looks for work before it sleeps: about half a millisecond."""

# What a caller and a helper share, one cache line each: the number of the latest offer; the offer
# that has been taken, by the helper or back by the caller; the one that the helper has finished;
# whether it sleeps; what is to be called with what; and the latest offer that the helper has seen.
_LINE: Final = 8
_OFFERED, _TAKEN, _FINISHED, _ASLEEP, _FUNCTION, _ARGUMENT, _NUMBER = (
    _LINE * which for which in range(7)
)
_WORDS: Final = 7 * _LINE

cgutils: Any = numba.core.cgutils  # has no types
_I64 = ir.IntType(64)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def _read(_typing: Any, address: Any) -> Any:
    """An int64 that another thread may write; what it wrote before is seen, too."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def _write(_typing: Any, address: Any, value: Any) -> Any:
    """Write an int64 that another thread may read, after all that was written before."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _swap(_typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Write an int64 if it is still the old one; whether it was."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = _word(builder, args[0])
        result = builder.cmpxchg(word, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@intrinsic
def _call(_typing: Any, function: Any, argument: Any) -> Any:
    """Call the ``void(void *)`` at an address."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


_PAUSES: Final = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}


@intrinsic
def _pause(_typing: Any) -> Any:
    """Tell the processor that this thread only looks for something, where it can be told."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, values = _PAUSES[platform.machine()]
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [word for _ in values])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [word(value) for value in values])
        return context.get_dummy_value()

    return types.void(), emit


_numba: Any = numba  # has few types
_inlined = _numba.njit(nogil=True)


@_inlined
def _take(at):
    """Do what is offered, if it can still be taken; whether there was something."""
    number: Any = _read(at + 8 * _OFFERED)
    if number == _read(at + 8 * _NUMBER):
        return False
    if _swap(at + 8 * _TAKEN, number - 1, number):
        _call(_read(at + 8 * _FUNCTION), _read(at + 8 * _ARGUMENT))
        _write(at + 8 * _FINISHED, number)
    _write(at + 8 * _NUMBER, number)
    return True


@cache
def _code() -> tuple[Any, Any]:
    """What helpers and what callers run, compiled."""
    stamp = source_stamp(Path(__file__))
    carray = _numba.carray

    def help_out(pointer):
        # Until there has been nothing to do for a moment; then it is said to sleep.
        at = carray(pointer, (1,))[0]
        if not stamp:
            return
        looks = 0
        while looks < _LOOKS:
            if _take(at):
                looks = 0
            else:
                looks += 1
                _pause()
        _write(at + 8 * _ASLEEP, 1)
        # What was offered meanwhile has not seen that.
        if _take(at):
            _write(at + 8 * _ASLEEP, 0)

    def lead(pointer):
        # Words: helpers, function, argument, and each helper's address.
        if not stamp:
            return
        words = carray(pointer, (3,))
        count, function, argument = words[0], words[1], words[2]
        places = carray(pointer, (3 + count,))
        for i in range(3, 3 + count):
            at = places[i]
            _write(at + 8 * _FUNCTION, function)
            _write(at + 8 * _ARGUMENT, argument)
            _write(at + 8 * _OFFERED, _read(at + 8 * _OFFERED) + 1)
        _call(function, argument)
        for i in range(3, 3 + count):
            at = places[i]
            number: Any = _read(at + 8 * _OFFERED)
            if not _swap(at + 8 * _TAKEN, number - 1, number):
                while _read(at + 8 * _FINISHED) != number:
                    _pause()

    signature = types.void(types.CPointer(types.int64))
    return compiled_callback(signature, help_out), compiled_callback(signature, lead)


class _Helper:
    """One thread, and what it shares with the caller."""

    def __init__(self, number: int) -> None:
        self._memory = np.zeros(_WORDS + _LINE, dtype=np.int64)
        start = -(self._memory.ctypes.data // 8) % _LINE
        words: Any = self._memory[start : start + _WORDS]
        self._words = memoryview(words)
        self.address = self._memory.ctypes.data + 8 * start
        self._place = np.array([self.address])
        self._wakes = threading.Semaphore(0)
        thread = threading.Thread(target=self._work, name=f"compute-{number}", daemon=True)
        thread.start()

    def wake(self) -> None:
        if self._words[_ASLEEP]:
            self._words[_ASLEEP] = 0
            self._wakes.release()

    def _work(self) -> None:
        help_out = _code()[0].ctypes
        place = ctypes.cast(self._place.ctypes.data, ctypes.POINTER(ctypes.c_int64))
        while True:
            help_out(place)
            if self._words[_ASLEEP]:
                self._wakes.acquire()


class _Size(threading.local):
    """How many threads compute when this one asks."""

    threads: int | None = None


_size = _Size()


def set_team_size(threads: int) -> None:
    """Have so many threads compute what this thread asks for, whatever torch uses for its own.

    Args:
        threads: This one included.
    """
    _size.threads = threads


def team_size() -> int:
    """How many threads compute what this thread asks for: torch's number unless it was set."""
    return _size.threads or torch.get_num_threads()


class _Team(threading.local):
    """The helpers of one thread."""

    def __init__(self) -> None:
        self.helpers: list[_Helper] = []
        self.words = np.zeros(0, dtype=np.int64)
        self.lead = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_code()[1].address)

    def grow(self, helpers: int) -> None:
        self.helpers += [_Helper(next(_numbers)) for _ in range(helpers - len(self.helpers))]
        self.words = np.array([0, 0, 0, *(helper.address for helper in self.helpers)])


_numbers = itertools.count()
_team: _Team | None = None


def run_together(function: int, argument: int, threads: int) -> None:
    """Have several threads call a function at the same time; returns when all have returned.

    Helpers are started when this thread first asks for so many. The function has to do everything
    even if nobody comes to help.

    Args:
        function: Address of a ``void(void *)`` that needs no GIL.
        argument: What each call is given, an address.
        threads: How many, this one included.
    """
    global _team  # noqa: PLW0603 - compiled when it is first needed
    if threads == 1:
        _alone(function)(argument)
        return
    if _team is None:
        _team = _Team()
    team = _team
    if len(team.helpers) < threads - 1:
        team.grow(threads - 1)
    for helper in team.helpers[: threads - 1]:
        helper.wake()
    team.words[:3] = threads - 1, function, argument
    team.lead(team.words.ctypes.data)


@cache
def _alone(function: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
