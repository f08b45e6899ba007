"""The progress bar of the commands of ``moeless predictor``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(console: Console, name: str) -> Iterator[Any]:
    """A progress bar that shows once there is progress.

    Args:
        console: Where to.
        name: What is being done.

    Returns:
        Called with what is being done, how much of it is done, and of how much.
    """
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = bars.add_task(name, total=None)

    def show(what: str, done: int, total: int) -> None:
        if not bars.live.is_started:
            bars.start()
        bars.update(task, description=f"{name}: {what}", completed=done, total=total)

    try:
        yield show
    finally:
        if bars.live.is_started:
            bars.stop()
