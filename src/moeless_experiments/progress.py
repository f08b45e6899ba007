"""A progress bar on stderr for what an experiment says of its progress."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moeless_experiments.context import Progress as Tell


@contextmanager
def progress_bar(console: Console) -> Iterator[Tell]:
    """A bar that shows while the block runs.

    Args:
        console: Where to.

    Returns:
        Told what is being done, how much of it is done, and of how much.
    """
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bars.add_task("starting", total=None)

    def tell(what: str, done: int, total: int) -> None:
        bars.update(task, description=what, completed=done, total=total)

    with bars:
        yield tell
