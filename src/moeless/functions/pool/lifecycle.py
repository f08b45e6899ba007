"""The life of a function instance, as one transition table.

::

    COLD ──load──► LOADING ──loaded──► WARM ──begin──► BUSY
     ▲                │                 │ ▲              │
     │              failed            drain └───finish───┘
     │                │                 ▼
     └────────────────┴────evicted── DRAINING
"""

from dataclasses import dataclass
from enum import Enum

from moeless.core.model import FunctionId
from moeless.errors import TransitionError


class State(Enum):
    """Where an instance is in its life."""

    COLD = "cold"
    LOADING = "loading"
    WARM = "warm"
    BUSY = "busy"
    DRAINING = "draining"


class Step(Enum):
    """What can happen to an instance."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    BEGIN = "begin"
    FINISH = "finish"
    DRAIN = "drain"
    EVICTED = "evicted"
    LOST = "lost"


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.COLD, Step.LOAD): State.LOADING,
    (State.LOADING, Step.LOADED): State.WARM,
    (State.LOADING, Step.FAILED): State.COLD,
    (State.WARM, Step.BEGIN): State.BUSY,
    (State.BUSY, Step.FINISH): State.WARM,
    (State.WARM, Step.DRAIN): State.DRAINING,
    (State.DRAINING, Step.EVICTED): State.COLD,
    # A device that disappears takes its instances along, whatever they were doing.
    (State.LOADING, Step.LOST): State.COLD,
    (State.WARM, Step.LOST): State.COLD,
    (State.BUSY, Step.LOST): State.COLD,
    (State.DRAINING, Step.LOST): State.COLD,
}


@dataclass(kw_only=True)
class Instance:
    """One function on one device.

    Args:
        function: Which function.
        device: Device index.
        num_bytes: Bytes it holds on the device while not cold.
        state: Where it is in its life.
        since_s: When it entered the state.
        idle_since_s: From when on it has been idle: its last invocation, or when it became warm.
        blocking: A token waits, or waited, for its load.
    """

    function: FunctionId
    device: int
    num_bytes: int
    state: State = State.COLD
    since_s: float = 0.0
    idle_since_s: float = 0.0
    blocking: bool = False

    def take(self, step: Step, *, now_s: float) -> None:
        """Make a transition.

        Raises:
            TransitionError: The state machine has no such step from this state.
        """
        after = TRANSITIONS.get((self.state, step))
        if after is None:
            raise TransitionError(
                f"{self.function} on device {self.device} is {self.state.value}: "
                f"it cannot {step.value}"
            )
        if step in (Step.LOADED, Step.FINISH):
            self.idle_since_s = now_s
        self.state = after
        self.since_s = now_s
