"""A place for a device, with a worker or without one."""

from dataclasses import dataclass
from enum import StrEnum

from moeless.functions.supervisor.config import WorkerConfig


class SlotState(StrEnum):
    """What a place is good for now."""

    DOWN = "down"
    """Nobody is there, and nobody was asked to be."""
    STARTING = "starting"
    """A worker starts, or will after a wait."""
    UP = "up"
    DRAINING = "draining"
    """What it holds is moved elsewhere; then it ends."""
    DRAINED = "drained"
    """It has ended as it was asked to."""


FREE = frozenset({SlotState.DOWN, SlotState.DRAINED})


@dataclass(kw_only=True)
class Slot:
    """One of the places that engines know of.

    Args:
        device: Its number.
        config: How its worker runs; None where there was never one.
        state: See ``SlotState``.
        joined: The device was in use since it was added: a worker that is lost is replaced.
        restarts: Workers that were lost here.
        failures: Those of them that were lost in a row.
        started_s: When the newest worker was started.
        restart_at_s: When the next one is due.
        drain_began_s: When draining began.
        note: Why nobody is there, if it was not asked for.
    """

    device: int
    config: WorkerConfig | None = None
    state: SlotState = SlotState.DOWN
    joined: bool = False
    restarts: int = 0
    failures: int = 0
    started_s: float = 0.0
    restart_at_s: float | None = None
    drain_began_s: float = 0.0
    note: str = ""

    @property
    def is_free(self) -> bool:
        """Whether another device may come here."""
        return self.state in FREE

    @property
    def is_awaited(self) -> bool:
        """Whether engines that attach wait for its worker."""
        return self.joined and self.state in (SlotState.STARTING, SlotState.UP)

    @property
    def label(self) -> str:
        """A short unique name for tables and metric labels."""
        if self.config is None:
            return f"device:{self.device}"
        name = self.config.torch_device
        return f"cpu:{self.device}" if name == "cpu" else name
