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
class EventsLost(Event):
    """Here events are missing that could not be written. Time and model are of the last of them.

    Args:
        count: How many.
    """

    count: int


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
        replicas: Replicas planned in all; copies of one expert on one device are one replica.
        expected_error: Share of the tokens that the load it was made for is expected to misplace;
            None where that is not known.
    """

    step: int
    layer: int
    plan_s: float
    started: int
    retired: int
    kept: int
    replicas: int
    expected_error: float | None = None


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


@dataclass(frozen=True, kw_only=True)
class DeviceJoined(Event):
    """A device was added while serving, and is in use from now on.

    Args:
        device: Device index.
        label: Its name in tables and metrics.
        budget_bytes: What it may hold.
        start_s: Seconds from the start of its worker.
    """

    device: int
    label: str
    budget_bytes: int
    start_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceDrained(Event):
    """A device has left as it was asked to: it holds nothing, and its worker has ended.

    Args:
        device: Device index.
        drain_s: Seconds since it was asked to.
    """

    device: int
    drain_s: float


@dataclass(frozen=True, kw_only=True)
class BudgetChanged(Event):
    """A device was given another budget; what is held beyond it leaves.

    Args:
        device: Device index.
        before_bytes: Its budget until now.
        budget_bytes: Its budget from now on.
    """

    device: int
    before_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class PredictorSwapped(Event):
    """A predictor that learns from live traffic was replaced by a better one.

    Args:
        swaps: Swaps so far.
        layers: Layers in which the new one differs.
        fitted_tokens: Live tokens that it was fitted to; old ones count less than one each.
        judged_tokens: Newer tokens that both were judged by.
        accuracy_before: Mean load accuracy of the old one on those.
        accuracy_after: The same of the new one.
    """

    swaps: int
    layers: int
    fitted_tokens: int
    judged_tokens: int
    accuracy_before: float
    accuracy_after: float


@dataclass(frozen=True, kw_only=True)
class SupervisorWoken(Event):
    """The supervisor began to deal with a message, or looked around; only while recording.

    What follows until the next such event was decided for this position of the engine.

    Args:
        cause: ``loads`` for what an engine has to say of them, ``message`` for anything else that
            was sent, or ``tick``.
        step: The engine's iteration, from 1; 0 before the first.
        layer: The MoE layer whose gate spoke last, -1 between steps.
        used: Layers of which it is known from now on when the engine last used their replicas,
            each as (layer, step): later steps of the layer are not known yet.
    """

    cause: str
    step: int
    layer: int
    used: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class DemandTaken(Event):
    """The platform was told that tokens wait for experts that are warm nowhere.

    Args:
        layer: MoE layer.
        experts: Which ones.
    """

    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LoadTaken(Event):
    """The control loop was told of a load; only while recording.

    Args:
        kind: ``forecast``, or ``actual`` for a load that came true.
        step: Iteration the load belongs to.
        layer: MoE layer.
        tokens: Sum of the load.
    """

    kind: str
    step: int
    layer: int
    tokens: float


@dataclass(frozen=True, kw_only=True)
class SearchTaken(Event):
    """The control loop took up what a search beside planning had found, if anything.

    Args:
        layer: MoE layer.
        loads: How many loads of the layer had come true when the search began.
    """

    layer: int
    loads: int


@dataclass(frozen=True, kw_only=True)
class ReplicasChanged(Event):
    """A plan in force has other replicas than the layer's plan before; only while recording.

    Args:
        step: Iteration of the load that it was made from.
        layer: MoE layer.
        devices_E: The devices of each expert; a device is repeated for several copies [E].
    """

    step: int
    layer: int
    devices_E: tuple[tuple[int, ...], ...]
