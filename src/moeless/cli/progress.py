"""How far a long task is: bars on a terminal, lines of plain text anywhere else.

A pipe, a log or a CI job gets a line at every stage and, while one lasts, another every few
seconds, so that nobody has to guess whether something hangs.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

LINE_EVERY_S: Final = 4.0
"""The longest that a log is silent while something lasts."""

_NOTICEABLE_S: Final = 1.0

Tell = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


class ProgressLines:
    """Lines about stages; while one lasts, a thread says so every few seconds.

    Args:
        write: Told each line, from whichever thread has something to say.
        clock: Seconds that only grow.
        every_s: The longest silence.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LINE_EVERY_S,
    ) -> None:
        self._write = write
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stage = ""
        self._state = ""
        self._lasts = False
        self._began_s = self._said_s = clock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._keep_saying, daemon=True, name="progress")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say no more; may be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def stage(self, what: str) -> None:
        """Say that something begins, of which nobody knows how much it is."""
        with self._lock:
            self._begin(what)

    def expect(self, what: str) -> None:
        """Something begins that is soon over, as a rule; it is said if it lasts."""
        with self._lock:
            self._stage, self._state, self._lasts = what, "", True
            self._began_s = self._said_s = self._clock()

    def tell(self, what: str, done: int, total: int) -> None:
        """Say what is done of a stage: when it begins, when it ends, and seldom in between."""
        with self._lock:
            if what != self._stage:
                self._begin(what)
            self._state = f" {done}/{total}" if total > 1 else ""
            self._lasts = done < total
            if not self._lasts and self._clock() - self._began_s >= _NOTICEABLE_S:
                self._say()
            else:
                self._remind()

    def remind(self) -> None:
        """Say once more what lasts, if nothing has been said for too long."""
        with self._lock:
            self._remind()

    def _begin(self, what: str) -> None:
        self._stage, self._state, self._lasts = what, "", True
        self._began_s = self._said_s = self._clock()
        self._write(what)

    def _remind(self) -> None:
        if self._lasts and self._clock() - self._said_s >= self._every_s:
            self._say()

    def _say(self) -> None:
        self._said_s = self._clock()
        self._write(f"{self._stage}{self._state}, {self._said_s - self._began_s:.0f} s")

    def _keep_saying(self) -> None:
        while not self._over.wait(self._every_s / 4):
            self.remind()


@contextmanager
def show_progress(console: Console, *, prefix: str = "") -> Iterator[Tell]:
    """Show how far something is while the block runs.

    Args:
        console: Where to. A terminal gets one bar per stage, from when there is progress.
        prefix: Stands before every stage.

    Returns:
        Called with the stage, what of it is done, and of how much.
    """
    if not console.is_terminal:

        def write(line: str) -> None:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        with ProgressLines(write) as lines:
            yield lambda what, done, total: lines.tell(prefix + what, done, total)
        return
    bars = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    stages: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in stages:
            bars.start()
            stages[what] = bars.add_task(prefix + what, total=total)
        bars.update(stages[what], completed=done, total=total)

    try:
        yield show
    finally:
        if bars.live.is_started:  # a bar that never showed would leave an empty line
            bars.stop()
