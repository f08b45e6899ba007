"""The real clock and one that tests turn by hand."""

import time


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to.

    Args:
        start_s: Initial time in seconds.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back {-seconds} s")
        self._now_s += seconds
