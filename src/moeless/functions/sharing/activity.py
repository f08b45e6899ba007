"""When the engines of a model last got on with something: whether it is busy, idle or asleep.

What engines announce does not tell: they say nothing while their plans stand. Their steps and
layers do. It must not know torch, sockets or processes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moeless.core.ports import Clock
from moeless.functions.links.board import EngineBoard

IDLE_S = 3.0
"""An engine that has not moved for so long has no request: a layer takes less."""
ASLEEP_S = 60.0
"""A model without traffic for so long does not need what it is guaranteed."""


@dataclass(kw_only=True)
class _Seen:
    position: tuple[int, int]
    moved_s: float = -math.inf


class Activity:
    """Watches the boards of a model's engines.

    Args:
        engines: By number; kept up to date by the owner.
        clock: The time.
        idle_s: How long an engine may stand still and still count as busy.
        asleep_s: How long a model's engines may stand still until it counts as asleep.
    """

    def __init__(
        self,
        engines: Mapping[int, EngineBoard],
        *,
        clock: Clock,
        idle_s: float = IDLE_S,
        asleep_s: float = ASLEEP_S,
    ) -> None:
        self._engines = engines
        self._clock = clock
        self._idle_s = idle_s
        self._asleep_s = asleep_s
        self._seen: dict[int, _Seen] = {}
        self._latest_s = -math.inf

    def note_traffic(self) -> None:
        """Somebody wants something of the model now, though no engine has moved."""
        self._latest_s = self._clock.now_s()

    def is_busy(self, engine: int) -> bool:
        """Whether an engine has moved a moment ago."""
        return self.still_s(engine) <= self._idle_s

    def still_s(self, engine: int) -> float:
        """For how long an engine has not moved, as far as that was noticed."""
        now_s = self._clock.now_s()
        return now_s - self._look(engine, now_s).moved_s

    def look(self, engine: int) -> None:
        """Notice whether an engine has moved; the oftener, the more exactly it is known when."""
        self._look(engine, self._clock.now_s())

    def any_busy(self) -> bool:
        """Whether some engine has moved a moment ago."""
        busy = False
        for engine in self._engines:
            busy |= self.is_busy(engine)  # each one is looked at
        return busy

    def is_asleep(self) -> bool:
        """Whether the model has had no traffic for long; without engines it is at once."""
        self.any_busy()
        return not self._engines or self._clock.now_s() - self._latest_s > self._asleep_s

    def _look(self, engine: int, now_s: float) -> _Seen:
        board = self._engines[engine]
        position = int(board.step[0]), int(board.layer[0])
        seen = self._seen.setdefault(engine, _Seen(position=(0, -1)))
        if seen.position != position:
            seen.position, seen.moved_s = position, now_s
            self._latest_s = now_s
        return seen

    def forget(self, engine: int) -> None:
        """An engine is gone."""
        self._seen.pop(engine, None)
