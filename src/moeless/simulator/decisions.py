"""When decisions take effect: the control loop's side of simulated time."""

from collections.abc import Callable
from functools import partial

from moeless.core.plan import CountArray, Plan, PlanDiff, ReplicaArray, SpeedArray
from moeless.functions.planning.load_intake import LoadIntake
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.simulator.event_loop import EventLoop


class DeferredPlacement:
    """A placement on which a plan is in force only once its decision has taken its time.

    A ``core.ports.Placement``. Decisions are made one after the other: a planner that is asked
    for several plans at once delivers them one by one.

    Args:
        model: The placement.
        loop: Simulated time.
        decision_s: Seconds of one decision; the same for every policy, so that results do not
            depend on the machine.
    """

    def __init__(self, model: ModelPlacement, *, loop: EventLoop, decision_s: float) -> None:
        self._model = model
        self._loop = loop
        self._decision_s = decision_s
        self.busy_until_s = 0.0
        self.plans: dict[int, Plan] = {}
        """The newest plan of each layer that is in force."""

    @property
    def num_devices(self) -> int:
        """D."""
        return self._model.num_devices

    def alive_ED(self, layer: int) -> ReplicaArray:
        """Warm replicas of a layer, uint8 [E, D]."""
        return self._model.alive_ED(layer)

    def planned_ED(self, layer: int) -> ReplicaArray:
        """Copies in the layer's plan in force, uint8 [E, D]."""
        return self._model.planned_ED(layer)

    def capacity_D(self, layer: int) -> CountArray:
        """Replicas of the layer that each device may hold, int64 [D]."""
        return self._model.capacity_D(layer)

    def speed_D(self) -> SpeedArray | None:
        """Relative speeds that devices have shown of late [D]; None where all are equal."""
        return self._model.speed_D()

    def apply(self, plan: Plan, *, decision_s: float) -> PlanDiff:
        """Put a plan in force when its decision is over.

        Returns:
            Nothing yet: what it changes is known only then.
        """
        del decision_s  # the simulated clock stands still while a planner thinks
        self.busy_until_s = max(self.busy_until_s, self._loop.clock.time_s) + self._decision_s
        self._loop.at(self.busy_until_s, partial(self._put_in_force, plan))
        return PlanDiff(layer=plan.layer)

    def _put_in_force(self, plan: Plan) -> None:
        self.plans[plan.layer] = plan
        self._model.apply(plan, decision_s=self._decision_s)


class DeferredIntake:
    """Has new loads looked at as soon as the control loop is free.

    Args:
        intake: Hands loads to the control loop.
        placement: Knows until when the control loop is busy.
        loop: Simulated time.
    """

    def __init__(
        self, intake: LoadIntake, placement: DeferredPlacement, *, loop: EventLoop
    ) -> None:
        self._intake = intake
        self._placement = placement
        self._loop = loop
        self._pending = False

    def announce(self) -> None:
        """Loads on the board are new."""
        if self._pending:
            return
        if self._placement.busy_until_s <= self._loop.clock.time_s:
            self._intake.take()
        else:
            self._pending = True
            self._loop.at(self._placement.busy_until_s, self._take)

    def _take(self) -> None:
        self._pending = False
        self._intake.take()


class DeferredSearcher:
    """Searches end when their simulated time is over. A ``control.search.Searcher``.

    Args:
        loop: Simulated time.
        search_s: Seconds of one search, whatever it really took.
    """

    def __init__(self, *, loop: EventLoop, search_s: float) -> None:
        self._loop = loop
        self._search_s = search_s
        self._busy_until_s = 0.0

    def submit(self, search: Callable[[], None]) -> bool:
        """Have a search done after those before it."""
        self._busy_until_s = max(self._busy_until_s, self._loop.clock.time_s) + self._search_s
        self._loop.at(self._busy_until_s, search)
        return False
