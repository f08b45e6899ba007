"""Events of a platform: what tokens wait for, and what became of instances."""

from collections.abc import Callable, Sequence
from typing import Any

from moeless.core.events import DemandTaken, Event, InstanceLoaded
from moeless.core.model import FunctionId
from moeless.core.ports import EventSink
from moeless.functions.pool.lifecycle import Instance


class PlatformNews:
    """Tells what happened. All times are those before anything was done about it.

    Args:
        sink: Receives events.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    @property
    def lost(self) -> int:
        """Events that did not get where they should be kept."""
        return getattr(self._sink, "lost", 0)

    def demanded(self, model: str, *, layer: int, experts: Sequence[int], time_s: float) -> None:
        """Tokens wait for experts of a layer."""
        self._sink.emit(
            DemandTaken(time_s=time_s, model=model, layer=layer, experts=tuple(experts))
        )

    def loaded(self, instance: Instance, *, began_s: float, time_s: float) -> None:
        """A load has ended well."""
        self.ended(
            InstanceLoaded,
            instance.function,
            instance.device,
            time_s=time_s,
            num_bytes=instance.num_bytes,
            load_s=time_s - began_s,
            blocking=instance.blocking,
        )

    def ended(
        self,
        kind: Callable[..., Event],
        function: FunctionId,
        device: int,
        *,
        time_s: float,
        **more: Any,
    ) -> None:
        """An order to a host has ended in an event of some kind, which has these fields more."""
        model, layer, expert = function
        self._sink.emit(
            kind(time_s=time_s, model=model, layer=layer, expert=expert, device=device, **more)
        )
