"""A device whose loads and evictions end when a record says so."""

from collections import deque
from dataclasses import dataclass, field

from moeless.core.events import InstanceEvicted, InstanceLoaded
from moeless.core.model import FunctionId
from moeless.errors import TraceError


@dataclass(frozen=True, kw_only=True)
class _Order:
    function: FunctionId
    reason: str | None = None
    """Why it is evicted; None for a load."""

    def __str__(self) -> str:
        what = f"expert {self.function.expert} of layer {self.function.layer}"
        return f"load {what}" if self.reason is None else f"evict {what} ({self.reason})"


@dataclass(kw_only=True)
class Absence:
    """A time without an instance on the device.

    Args:
        ordered_s: When it was told to evict it.
        until_s: When it had told that it holds it again.
    """

    ordered_s: float
    until_s: float = float("inf")


@dataclass(kw_only=True)
class RecordedHost:
    """One device's orders. A ``platform.host_port.HostPort``.

    A worker follows its orders one after the other, so they end in the order in which they were
    given: a record in which another one ends first is of a run that decided otherwise.

    Args:
        device: Device index.
        now_s: The time of the last moment; kept up to date by the owner.
    """

    device: int
    now_s: float = 0.0
    _orders: deque[_Order] = field(default_factory=deque)
    _absences: dict[FunctionId, list[Absence]] = field(default_factory=dict)

    def load(self, *functions: FunctionId) -> None:
        """Begin to load."""
        self._orders += [_Order(function=function) for function in functions]

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict."""
        self._orders.append(_Order(function=function, reason=reason))
        self._absences.setdefault(function, []).append(Absence(ordered_s=self.now_s))

    def end(self, function: FunctionId, event: InstanceLoaded | InstanceEvicted) -> None:
        """The oldest order has ended.

        Raises:
            TraceError: It was another one.
        """
        reason = event.reason if isinstance(event, InstanceEvicted) else None
        ended = _Order(function=function, reason=reason)
        oldest = self._orders.popleft() if self._orders else None
        if ended != oldest:
            raise TraceError(
                f"device {self.device}, {event.time_s:.6f} s: the run's next order was to "
                f"{ended}, the replay's was {f'to {oldest}' if oldest else 'none'}"
            )
        if reason is None and function in self._absences:
            self._absences[function][-1].until_s = event.time_s

    def may_have_missed(self, function: FunctionId, *, from_s: float, until_s: float) -> bool:
        """Whether an instance may have been absent at some time between two."""
        return any(
            absence.ordered_s < until_s and absence.until_s > from_s
            for absence in self._absences.get(function, ())
        )
