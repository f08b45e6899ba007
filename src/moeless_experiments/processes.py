"""The processes in which independent cases of a run are computed, one case each at a time.

Must not know what a case is.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Generic, NamedTuple, TypeVar

from moeless.errors import FunctionError, MoelessError

_Argument = TypeVar("_Argument")
_Found = TypeVar("_Found")

Done = Callable[[int, _Found], None]
"""Told the place of a case that is done, and what came out."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class Job(NamedTuple, Generic[_Argument]):
    """A case to be computed.

    Args:
        label: Names it, for progress and errors.
        argument: What the function is given.
    """

    label: str
    argument: _Argument


class _Failure(NamedTuple):
    """An error, as it is sent between processes: not every one can be pickled."""

    kind: type[MoelessError]
    text: str


class Processes:
    """Processes that live until the run ends: starting one takes longer than many a case.

    Each has one thread, so that what comes out does not depend on how many there are.

    Args:
        count: How many; with one, cases are computed in the caller's process.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        self._leash: Connection | None = None

    def run(
        self,
        function: Callable[[_Argument], _Found],
        jobs: Sequence[Job[_Argument]],
        on_done: Done[_Found],
    ) -> None:
        """Compute cases.

        Args:
            function: Computes one; a function of a module.
            jobs: The cases; begun in this order, so give the longest first.
            on_done: Told of each that is done, in the order in which they end.

        Raises:
            MoelessError: A case cannot be computed; the message names it. The others are given up.
            KeyboardInterrupt: Interrupted; the processes have ended.
        """
        if self.count < 2 or len(jobs) < 2:
            for place, job in enumerate(jobs):
                with _one_thread():
                    found = _attempt(function, job)
                on_done(place, _unwrap(found))
            return
        pool = self._open()
        waiting: dict[Future[_Found | _Failure], int] = {}
        try:
            for place, job in enumerate(jobs):
                waiting[pool.submit(_attempt, function, job)] = place
            for each in as_completed(waiting):
                on_done(waiting[each], _unwrap(each.result()))
        except (BrokenProcessPool, CancelledError) as error:
            self.close()
            left = [jobs[place].label for each, place in waiting.items() if _broke(each)]
            raise FunctionError(
                f"{' or '.join(left[: self.count])}: a process ended without a word, perhaps for "
                "want of memory; use fewer --processes"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes, whatever they are doing; the next run starts others."""
        pool, leash, self._pool, self._leash = self._pool, self._leash, None, None
        if pool is None or leash is None:
            return
        leash.close()
        pool.shutdown(wait=True, cancel_futures=True)

    def _open(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            held, self._leash = spawn.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=spawn, initializer=_begin, initargs=(held,)
            )
        return self._pool


def _begin(held: Connection) -> None:
    """One thread; and the end when the other end of the leash is let go, or its holder died.

    Ctrl-C reaches everybody at a terminal; it is the holder's to say what becomes of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _THREADS:
        os.environ[name] = "1"
    threading.Thread(target=_end_with, args=(held,), daemon=True).start()


def _end_with(held: Connection) -> None:
    try:
        held.recv()
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a process of the pool: sums may come out otherwise with another number of threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attempt(function: Callable[[_Argument], _Found], job: Job[_Argument]) -> "_Found | _Failure":
    try:
        return function(job.argument)
    except MoelessError as error:
        return _Failure(_plain(type(error)), f"{job.label}: {error}")
    except Exception as error:  # noqa: BLE001 - one line that names the case, whatever it was
        return _Failure(FunctionError, f"{job.label}: {type(error).__name__}: {error}")


def _plain(kind: type[MoelessError]) -> type[MoelessError]:
    """A class that can be made of a message alone."""
    return kind if kind.__init__ is MoelessError.__init__ else MoelessError


def _unwrap(found: "_Found | _Failure") -> _Found:
    if isinstance(found, _Failure):
        raise found.kind(found.text)
    return found


def _broke(each: "Future[_Found | _Failure]") -> bool:
    return not each.done() or each.cancelled() or each.exception() is not None
