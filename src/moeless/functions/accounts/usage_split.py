"""Divides what a model has used over its engines, so that nothing is counted twice or never.

Engines share instances, so most of what a model uses belongs to no one of them. It is divided
as it grows: time and bytes in proportion to how long instances have computed for each engine
meanwhile, equally where none have; what comes in pieces goes to the engine that had most. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counters that only grow.

    Args:
        pieces: Of things that are not divided, int64 [N].
        amounts: Of things that are, float64 [M].
    """

    pieces: CountArray
    amounts: NDArray[np.float64]

    def __add__(self, other: "Usage") -> "Usage":
        """Both together."""
        return Usage(pieces=self.pieces + other.pieces, amounts=self.amounts + other.amounts)

    def __sub__(self, other: "Usage") -> "Usage":
        """What this has more."""
        return Usage(pieces=self.pieces - other.pieces, amounts=self.amounts - other.amounts)

    def nothing(self) -> "Usage":
        """Zeros of the same shape."""
        return Usage(pieces=np.zeros_like(self.pieces), amounts=np.zeros_like(self.amounts))


class UsageSplit:
    """What each engine has used since it joined.

    Args:
        total: The counters now.
    """

    def __init__(self, total: Usage) -> None:
        self._total = total
        self._used: dict[int, Usage] = {}
        self._busy_ns: dict[int, int] = {}

    def join(self, engine: int) -> None:
        """An engine has used nothing yet; call ``settle`` first."""
        self._used[engine] = self._total.nothing()
        self._busy_ns[engine] = 0

    def leave(self, engine: int) -> None:
        """An engine uses nothing any more; call ``settle`` first."""
        del self._used[engine], self._busy_ns[engine]

    def of(self, engine: int) -> Usage:
        """What an engine has used."""
        return self._used[engine]

    def settle(self, total: Usage, busy_ns: Mapping[int, int]) -> None:
        """Divide what was used since the last time; what no engine was there for is nobody's.

        Args:
            total: The counters now.
            busy_ns: How long instances have computed for each engine in all.
        """
        growth, self._total = total - self._total, total
        worked = {engine: busy_ns[engine] - self._busy_ns[engine] for engine in self._used}
        self._busy_ns = {engine: busy_ns[engine] for engine in self._used}
        if not worked:
            return
        most = min(worked, key=lambda engine: (-worked[engine], engine))
        all_ns = sum(worked.values())
        for engine, used in self._used.items():
            part = worked[engine] / all_ns if all_ns > 0 else 1.0 / len(worked)
            pieces = growth.pieces if engine == most else np.zeros_like(growth.pieces)
            self._used[engine] = used + Usage(pieces=pieces, amounts=growth.amounts * part)
