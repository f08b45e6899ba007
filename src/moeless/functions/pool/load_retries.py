"""When a load that has failed may be tried again: the longer the more often it has failed.

Loads that tokens wait for do not ask here. Pure.
"""

from moeless.core.model import FunctionId

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


class LoadRetries:
    """Failed loads by function and device."""

    def __init__(self) -> None:
        self._failures: dict[tuple[FunctionId, int], tuple[int, float]] = {}

    def note_failure(self, function: FunctionId, device: int, *, now_s: float) -> None:
        """A load has failed."""
        count = self._failures.get((function, device), (0, 0.0))[0]
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(count, 10))
        self._failures[function, device] = (count + 1, now_s + wait_s)

    def note_success(self, function: FunctionId, device: int) -> None:
        """A load has ended well."""
        self._failures.pop((function, device), None)

    def forget_device(self, device: int) -> None:
        """The device has a new host, which may do better."""
        for key in [key for key in self._failures if key[1] == device]:
            del self._failures[key]

    def must_wait(self, function: FunctionId, device: int, *, now_s: float) -> bool:
        """Whether it is too early to try again."""
        return self._failures.get((function, device), (0, 0.0))[1] > now_s

    def due(self, *, now_s: float) -> list[tuple[FunctionId, int]]:
        """Loads that have failed and may be tried again."""
        return [key for key, (_, at_s) in self._failures.items() if at_s <= now_s]
