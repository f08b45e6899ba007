"""What the default planner remembers of a layer between plans and searches."""

from dataclasses import dataclass, field

from moeless.core.plan import CountArray, LoadArray, ReplicaArray
from moeless.policies.planners.set_search import Change, SetSearch

EARLY_STEPS = (4, 8, 16, 32)
"""Steps after which a layer is searched thoroughly: little was known before."""


@dataclass(kw_only=True)
class LayerState:
    """A layer's replica set, and what it was judged by."""

    capacity: tuple[int, ...]
    replicas_ED: ReplicaArray
    max_replicas: int
    window_NE: CountArray
    sets: SetSearch
    """Searches for devices of the speeds in force."""
    speeds: bytes | None
    """Those speeds, as plans are asked for with; None where all are equal."""
    is_unsettled: bool = False
    """The set was searched for other speeds."""
    observed: int = 0
    last_step: int = 0
    next_search: int = 0
    next_restart: int = EARLY_STEPS[-1]
    pause: int = 0
    searches: int = 0
    best_excess: float = 0.0
    forecast_error: float = 0.0
    stated_error: float = 0.0
    forecast: tuple[int, LoadArray, float | None] | None = None
    changes: list[tuple[int, Change]] = field(default_factory=list)
    """The newest ones, each with the step whose load was the last that it was based on."""

    def know_loads_of(self, earlier: "LayerState") -> None:
        """Take over what was observed before capacities or devices changed."""
        if earlier.window_NE.shape != self.window_NE.shape:
            return
        self.window_NE, self.observed = earlier.window_NE, earlier.observed
        self.next_search = self.observed + 1

    def believed_error(self, stated: float | None) -> float:
        """Share of the tokens that a forecast is taken to misplace.

        What the predictor states knows the size of the batch, what came true knows how much its
        statements are worth: the one is scaled by the other. One alone stands for itself.
        """
        if stated is None:
            return self.forecast_error
        if self.stated_error <= 0.0:
            return stated
        return min(1.0, stated * self.forecast_error / self.stated_error)

    def newest_statement(self) -> str:
        """For the reason: what the predictor said of the forecast in force."""
        stated = None if self.forecast is None else self.forecast[2]
        if stated is None:
            return ""
        return f", the newest is expected to miss {self.believed_error(stated):.1%}"
