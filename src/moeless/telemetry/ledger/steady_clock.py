"""Wall time for what is kept for years: a clock that jumps is not believed at once.

A wrong date that a time server, a battery or a person sets for a moment must neither put usage
into periods of another year nor have old usage dropped.
"""

from collections.abc import Callable

_SLACK_S = 60.0
"""What time servers may correct in one go, and is followed at once."""


class SteadyClock:
    """Goes by the monotonic clock, and follows the wall clock.

    A wall clock that jumps is followed when it has stood where it jumped to for a while.

    Args:
        wall_s: Unix seconds, by the wall clock.
        monotonic_s: Seconds on a monotonic clock.
        stands_s: How long a jump has to stand.
    """

    def __init__(
        self,
        wall_s: Callable[[], float],
        monotonic_s: Callable[[], float],
        *,
        stands_s: float = 600.0,
    ) -> None:
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._stands_s = stands_s
        self._followed_since_s = monotonic_s()
        self._offset_s = wall_s() - self._followed_since_s
        self._jump: tuple[float, float] | None = None
        """Offset after a jump, and since when."""

    def now_s(self) -> float:
        """Unix seconds."""
        at_s = self._monotonic_s()
        offset_s = self._wall_s() - at_s
        if abs(offset_s - self._offset_s) <= _SLACK_S:
            self._offset_s, self._jump = offset_s, None
        elif self._jump is None or abs(offset_s - self._jump[0]) > _SLACK_S:
            self._jump = offset_s, at_s
        elif at_s - self._jump[1] >= self._stands_s:
            self._offset_s, self._jump, self._followed_since_s = offset_s, None, at_s
        return at_s + self._offset_s

    @property
    def has_stood(self) -> bool:
        """Whether the wall clock has been in step for long enough to do what is for good."""
        stood_s = self._monotonic_s() - self._followed_since_s
        return self._jump is None and stood_s >= self._stands_s
