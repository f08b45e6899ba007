"""What an experiment is given: how thorough to be, where data is, and whom to tell."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from moeless.errors import ConfigError
from moeless_experiments.processes import Job, Processes

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""

_Made = TypeVar("_Made")
_Argument = TypeVar("_Argument")


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody hears."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run of one or several experiments.

    Args:
        out: Directory of the results; each experiment writes a directory below it.
        cache: Where what takes long to make is kept between runs: recordings, predictors.
        quick: Fewer tokens, models and steps.
        seed: Of everything that is drawn.
        threads: Threads of what is timed in this process.
        processes: Number of processes that compute independent cases.
        shards: Recordings of gate inputs that the caller has, ``MODEL_PROMPTS`` below it.
        data: Public traces, prompts and timings; see CONTRIBUTING.md.
        progress: Told how far it is.
    """

    out: Path
    cache: Path
    quick: bool = False
    seed: int = 0
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    processes: int = 1
    shards: Path | None = None
    data: Path | None = None
    progress: Progress = silent
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def share(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """What several experiments of a run need, made once.

        Args:
            key: Names it; hashable.
            make: Makes it if it is not there yet.
        """
        if key not in self._shared:
            self._shared[key] = make()
        made: _Made = self._shared[key]
        return made

    def has(self, key: Any) -> bool:
        """Whether something of this name was made already."""
        return key in self._shared

    @property
    def cases(self) -> Processes:
        """The processes of this run."""
        return self.share(("processes",), lambda: Processes(self.processes))

    def compute(
        self,
        what: str,
        function: Callable[[_Argument], _Made],
        jobs: Sequence[Job[_Argument]],
        on_done: Callable[[int, _Made], None] = lambda *_: None,
    ) -> list[_Made]:
        """Compute independent cases in the run's processes.

        Args:
            what: What is done with them, for progress.
            function: Computes one; a function of a module.
            jobs: The cases, the longest first.
            on_done: Told the place of each that is done, and what came out.

        Returns:
            What came out, in the order of the jobs.

        Raises:
            MoelessError: A case cannot be computed; the message names it.
        """
        found: dict[int, _Made] = {}

        def note(place: int, made: _Made) -> None:
            found[place] = made
            on_done(place, made)
            self.progress(f"{what}: {jobs[place].label}", len(found), len(jobs))

        if jobs:
            self.progress(f"{what}: {jobs[0].label}", 0, len(jobs))
        self.cases.run(function, jobs, note)
        return [found[place] for place in range(len(jobs))]

    def settled(self) -> "Context":
        """The same for another process: nothing that was made, and nobody who listens."""
        return replace(self, progress=silent, _shared={})

    def require_data(self, name: str) -> Path:
        """A file or directory of the public data.

        Args:
            name: Its path below the data directory.

        Raises:
            ConfigError: It is not there.
        """
        if self.data is None:
            raise ConfigError(
                f"{name} is looked for below MOELESS_DATA_DIR, which is not set; see "
                "CONTRIBUTING.md"
            )
        path = self.data / name
        if not path.exists():
            raise ConfigError(f"{self.data} has no {name}; see CONTRIBUTING.md")
        return path


@lru_cache(maxsize=1)
def here(context: Context) -> Context:
    """A process's own context: cases of a run that it computes share what they make.

    Args:
        context: As ``settled`` gives it.
    """
    return context
