"""Typed telemetry events. Times are seconds of the emitting process's monotonic clock."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events.

    Args:
        time_s: When it happened.
        model: Model id.
    """

    time_s: float
    model: str


@dataclass(frozen=True, kw_only=True)
class PlanMade(Event):
    """A plan was put in force.

    Args:
        step: Iteration it is for.
        layer: MoE layer.
        plan_s: Seconds the decision took.
        started: Replicas whose load began or was queued.
        retired: Replicas no longer planned.
        kept: Planned replicas that were warm already.
        replicas: Replicas planned in all.
    """

    step: int
    layer: int
    plan_s: float
    started: int
    retired: int
    kept: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class PlanFailed(Event):
    """No plan could be made; the one in force stays."""

    step: int
    layer: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class InstanceLoaded(Event):
    """An instance became warm (a cold start).

    Args:
        layer: MoE layer.
        expert: Logical expert.
        device: Device index.
        num_bytes: Bytes it holds on the device.
        load_s: Seconds from the start of the load.
        blocking: A token waited for it.
    """

    layer: int
    expert: int
    device: int
    num_bytes: int
    load_s: float
    blocking: bool


@dataclass(frozen=True, kw_only=True)
class InstanceEvicted(Event):
    """An instance left its device."""

    layer: int
    expert: int
    device: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoadFailed(Event):
    """A load failed and was rolled back."""

    layer: int
    expert: int
    device: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker process ended or stopped answering."""

    device: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """A worker process is ready."""

    device: int
    restarts: int
