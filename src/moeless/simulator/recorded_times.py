"""When things happened in a run of real workers, imposed on its replay.

A run with a file of events says in which order its supervisor dealt with loads, demands, ends of
loads and of evictions, and for which position of the engine; the engine's side says what it found
on the board whenever it looked. A replay that has these things happen in that order must make the
same decisions: how long plans and loads take, and who of two that do not wait for each other is
first, is all that a simulator has to guess. Nothing of what was decided is taken from the record;
what cannot have followed from the replay's own decisions is an error.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeless.core.events import (
    DemandTaken,
    Event,
    EventsLost,
    InstanceEvicted,
    InstanceLoaded,
    LoadFailed,
    LoadTaken,
    SearchTaken,
    SupervisorWoken,
    WorkerLost,
)
from moeless.errors import TraceError

_DEALT_WITH = (SupervisorWoken, LoadTaken, DemandTaken, InstanceLoaded, InstanceEvicted)


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """A look of the token path at the board, and what became of what it handed out then.

    All times are by the clock of the events.

    Args:
        began_s: Before it looked.
        looked_s: After it, and before it demanded what is warm nowhere.
        usable_ED: The replicas that it could divide tokens over, bool [E, D].
        answered_s: When the devices had answered.
        left_ED: Those of them that had left when their devices looked for them, bool [E, D].
    """

    began_s: float
    looked_s: float
    usable_ED: NDArray[np.bool_]
    answered_s: float
    left_ED: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LayerLooks:
    """What the token path saw in one layer of one step.

    Args:
        looks: As many as it took until all tokens were computed.
        used_ns: When the replicas were last used, as the engine's board says it.
    """

    looks: Sequence[Look]
    used_ns: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that the supervisor dealt with.

    Args:
        began_s: When; all that followed from it was done later, and before the next moment.
        layer: The layer whose gate had spoken last, as far as it knew.
        event: What it had heard: a load, a demand, the end of a load or of an eviction, or only
            that it was time to look around.
        ends_loads: Whether an engine has nothing more to tell for now.
        searches: Those whose results were taken up while it was dealt with.
    """

    began_s: float
    layer: int
    event: Event
    ends_loads: bool = False
    searches: tuple[SearchTaken, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTimes:
    """The order of a run.

    Args:
        moments: What the supervisor dealt with, one thing after the other.
        looks: What the token path saw by (step, layer), steps counted from 0.
    """

    moments: Sequence[Moment]
    looks: Mapping[tuple[int, int], LayerLooks]

    @classmethod
    def of(
        cls, events: Iterable[Event], looks: Mapping[tuple[int, int], LayerLooks]
    ) -> "RecordedTimes":
        """Put events in order.

        Args:
            events: As a run recorded them.
            looks: See the class.

        Raises:
            TraceError: Something failed in that run, which cannot be replayed, or nothing was
                recorded.
        """
        moments: list[Moment] = []
        layer, hears_loads = -1, False
        for event in events:
            if isinstance(event, LoadFailed | WorkerLost):
                raise TraceError(f"the recorded run had a failure: {event.reason}")
            if isinstance(event, EventsLost):
                raise TraceError(f"{event.count} events of the recorded run are missing")
            if isinstance(event, SearchTaken) and moments:
                moments[-1] = replace(moments[-1], searches=(*moments[-1].searches, event))
            if not isinstance(event, _DEALT_WITH):
                continue
            if isinstance(event, SupervisorWoken):
                if hears_loads:
                    moments[-1] = replace(moments[-1], ends_loads=True)
                layer, hears_loads = event.layer, event.cause == "loads"
            moments.append(Moment(began_s=event.time_s, layer=layer, event=event))
        if not moments:
            raise TraceError("no event of a supervisor was recorded; run with --events")
        return cls(moments=moments, looks=looks)

    def searches(self) -> Iterator[SearchTaken]:
        """All searches whose results were taken up, in order."""
        return itertools.chain.from_iterable(moment.searches for moment in self.moments)
