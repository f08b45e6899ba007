"""What an experiment is given: how thorough to be, where data is, and whom to tell."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moeless.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""

_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run of one or several experiments.

    Args:
        out: Directory of the results; each experiment writes a directory below it.
        cache: Where what takes long to make is kept between runs: recordings, predictors.
        quick: Fewer tokens, models and steps.
        seed: Of everything that is drawn.
        threads: Threads of computations in this process.
        shards: Recordings of gate inputs that the caller has, ``MODEL_PROMPTS`` below it.
        data: Public traces, prompts and timings; see CONTRIBUTING.md.
        progress: Told how far it is.
    """

    out: Path
    cache: Path
    quick: bool = False
    seed: int = 0
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    shards: Path | None = None
    data: Path | None = None
    progress: Progress = lambda *_: None
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
