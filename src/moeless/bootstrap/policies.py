"""What a policy's name stands for: planner, splitter, history, and how often it plans."""

import math
from dataclasses import dataclass

from moeless.config import MemoryFactor
from moeless.core.layer_cost import LayerCost
from moeless.core.policy_set import PolicySet
from moeless.core.ports import Clock, Planner, Predictor, Splitter
from moeless.errors import ConfigError
from moeless.policies.planners import PLANNERS
from moeless.policies.predictors import PREDICTORS
from moeless.policies.splitters import SPLITTERS

DEFAULT_MEMORY_FACTOR = 2.0
EPLB_INTERVAL_S = 600.0
"""DeepSeek re-plans every ten minutes."""
SWIFT_INTERVAL_S = 60.0
"""Few moves at a time are affordable more often."""

ORACLE = "oracle"
"""Not a planner: a bound that only a simulator can run."""

_SERVERFUL = frozenset({"static", "eplb", "swift", ORACLE})
_SLOTTED = frozenset({"eplb", "swift"})
_SPLITTERS = {"moeless": "min_time", "eplb": "slots"}


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What policies can be told.

    Args:
        memory_factor: Warm replicas that a policy may hold, in multiples of E. For ``paper`` it
            is M_cap, for ``eplb`` and ``swift`` the slots, for ``moeless`` the ceiling; ``static``
            has one replica per expert in any case. Under ``auto`` the others take the default.
        cv_threshold: V of ``paper``.
        eplb_interval_s: Seconds between plans of ``eplb``.
        swift_interval_s: Seconds between plans of ``swift``.

    Raises:
        ConfigError: An interval is not positive.
    """

    memory_factor: MemoryFactor = DEFAULT_MEMORY_FACTOR
    cv_threshold: float = 0.2
    eplb_interval_s: float = EPLB_INTERVAL_S
    swift_interval_s: float = SWIFT_INTERVAL_S

    def __post_init__(self) -> None:
        for name in ("eplb_interval_s", "swift_interval_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; use a number of seconds")

    @property
    def fixed_memory_factor(self) -> float:
        """The factor for policies that need a number."""
        factor = self.memory_factor
        return DEFAULT_MEMORY_FACTOR if isinstance(factor, str) else factor


def is_serverful(name: str) -> bool:
    """Whether a policy holds all its experts all the time, so that none is ever idle for long."""
    return name in _SERVERFUL


def max_replicas(
    name: str, options: PolicyOptions, *, num_experts: int, num_devices: int
) -> int | None:
    """Replicas of a layer that a policy may hold, kept-alive ones included.

    Args:
        name: The policy.
        options: What it is told.
        num_experts: E.
        num_devices: D.

    Returns:
        The number, or None where the planner alone decides.
    """
    if name == "static":
        return None
    # The small numbers keep products that are whole but for binary fractions whole.
    replicas = options.fixed_memory_factor * num_experts
    if name in _SLOTTED:
        return math.ceil(math.ceil(replicas - 1e-9) / num_devices) * num_devices
    return max(math.floor(replicas + 1e-9), num_experts)


def build_policy_set(
    name: str,
    *,
    cost: LayerCost,
    options: PolicyOptions,
    clock: Clock,
    history: str = "previous",
    splitter: str | None = None,
) -> PolicySet:
    """Put a policy together.

    ``eplb`` and ``swift`` plan from a window of what was observed, whatever ``history`` says. A
    third party's planner gets no options and an even split.

    Args:
        name: A planner's name.
        cost: What experts cost in time, for the parts that optimise it.
        options: Numbers that policies can be told.
        clock: For windows of time.
        history: Predictor for the layers that no look-ahead sees, by name.
        splitter: A splitter by name; None takes the policy's own.

    Raises:
        ConfigError: No planner, predictor or splitter has that name, or a number is out of range.
    """
    planner = _build_planner(name, cost=cost, options=options)
    interval_s = {"eplb": options.eplb_interval_s, "swift": options.swift_interval_s}.get(name)
    return PolicySet(
        name=name,
        planner=planner,
        splitter=_build_splitter(splitter or _SPLITTERS.get(name, "even"), cost=cost),
        history=_build_history(history, interval_s, clock),
        replan_every_s=interval_s,
        adaptive=bool(getattr(planner, "adaptive", True)),
        uses_forecasts=name not in _SERVERFUL,
    )


def _build_planner(name: str, *, cost: LayerCost, options: PolicyOptions) -> Planner:
    numbers: dict[str, object] = {}
    if name == "paper":
        numbers = {
            "memory_factor": options.fixed_memory_factor,
            "cv_threshold": options.cv_threshold,
        }
    elif name in _SLOTTED:
        numbers = {"memory_factor": options.fixed_memory_factor}
    elif name == "even_split":
        numbers = {"cost": cost, "memory_factor": options.fixed_memory_factor}
    elif name == "moeless":
        factor = options.memory_factor
        numbers = {"cost": cost, "memory_factor": None if isinstance(factor, str) else factor}
    return PLANNERS.create(name, **numbers)


def _build_splitter(name: str, *, cost: LayerCost) -> Splitter:
    return SPLITTERS.create(name, **({"cost": cost} if name == "min_time" else {}))


def _build_history(history: str, interval_s: float | None, clock: Clock) -> Predictor:
    if interval_s is not None:
        return PREDICTORS.create("window", clock=clock, window_s=interval_s)
    return PREDICTORS.create(history)
