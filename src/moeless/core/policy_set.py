"""What a balancing policy consists of, as the control loop and the token path see it."""

from dataclasses import dataclass

from moeless.core.ports import Planner, Predictor, Splitter


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySet:
    """The parts that a policy's name stands for.

    Args:
        name: The policy's name.
        planner: Chooses replicas.
        splitter: Divides tokens over warm replicas.
        history: Expects loads from what was observed; used alone, or for the layers that a
            look-ahead cannot see.
        replan_every_s: Seconds between plans of a layer, which are then made from history alone
            (EPLB); None plans at every step.
        adaptive: Whether plans follow loads at all; a fixed planner is asked once.
        uses_forecasts: Whether look-ahead forecasts are planned from.
    """

    name: str
    planner: Planner
    splitter: Splitter
    history: Predictor
    replan_every_s: float | None = None
    adaptive: bool = True
    uses_forecasts: bool = True
