"""Plans the placement of a whole model from recorded loads, without serving it."""

import numpy as np

from moeless.bootstrap.placements.placement_plan import LayerPlan, PlacementPlan, PlacementTask
from moeless.bootstrap.placements.slot_filling import equalise_slots
from moeless.bootstrap.policies import DEFAULT_MEMORY_FACTOR, PolicyOptions, build_policy_set
from moeless.core.clock import ManualClock
from moeless.core.plan import CountArray, LoadArray, PlanRequest, ReplicaArray
from moeless.core.policy_set import PolicySet
from moeless.core.ports import Splitter
from moeless.errors import ConfigError, PlanError
from moeless.policies.planners import PLANNERS
from moeless.policies.splitters import SPLITTERS

_WHOLE = 1e9
"""Tokens to which fractional loads are scaled."""

_EQUAL_SLOTS = ("eplb", "swift")


def plan_placement(task: PlacementTask) -> PlacementPlan:
    """Plan all layers.

    Args:
        task: What to plan.

    Raises:
        ConfigError: An unknown policy, too few slots, slots that the policy cannot use, or a
            placement in force of another model.
    """
    capacity_D = slots_per_device(task)
    factor = max(int(capacity_D.sum()) / task.loads.num_experts, 1.0)
    policies = build_policy_set(
        task.policy,
        cost=task.cost,
        options=PolicyOptions(memory_factor=factor),
        clock=ManualClock(),
    )
    rows = [_plan_layer(task, row, policies, capacity_D) for row in range(task.loads.num_layers)]
    layers_LED = np.stack([after_ED for _, after_ED in rows])
    filled_LED = layers_LED
    if task.equal_slots:
        filled_LED = equalise_slots(layers_LED, task.loads.loads_LE, capacity_D)
    layers = tuple(
        _describe(task, row, before_ED, filled_LED[row], int(filled_LED[row].sum() - after.sum()))
        for row, (before_ED, after) in enumerate(rows)
    )
    return PlacementPlan(task=task, capacity_D=capacity_D, policies=policies, layers=layers)


def slots_per_device(task: PlacementTask) -> CountArray:
    """Replicas of a layer that each device may hold, int64 [D].

    Raises:
        ConfigError: Both slots and memory are given, memory without the size of an expert, or
            fewer slots than experts.
    """
    experts, devices, layers = task.loads.num_experts, task.num_devices, task.loads.num_layers
    if task.slots is not None and task.device_memory_bytes is not None:
        raise ConfigError("--slots and --device-memory say the same thing; give one of them")
    if task.device_memory_bytes is not None:
        if task.expert_bytes is None:
            raise ConfigError("--device-memory needs an expert's size: --expert-bytes or --model")
        each = task.device_memory_bytes // (task.expert_bytes * layers)
        capacity_D = np.full(devices, each, dtype=np.int64)
        needed = -(-experts // devices) * layers * task.expert_bytes
        advice = f"--device-memory of at least {needed / 1e9:.3g}GB (all {layers} layers), or more"
    else:
        slots = task.slots
        if slots is None:
            slots = -(-int(DEFAULT_MEMORY_FACTOR * experts) // devices) * devices
        share, rest = divmod(slots, devices)
        capacity_D = share + (np.arange(devices) < rest).astype(np.int64)
        advice = f"--slots of at least {experts}"
    held = int(np.minimum(capacity_D, experts).sum())
    if held < experts:
        raise ConfigError(
            f"{devices} devices have {held} slots per layer, but each of {experts} experts needs "
            f"one; give {advice}"
        )
    if task.policy in _EQUAL_SLOTS and capacity_D.min() != capacity_D.max():
        raise ConfigError(
            f"{task.policy} has the same number of slots on every device, and {devices} devices "
            f"do not divide {task.slots}; use --slots {devices * capacity_D.max()}, or --policy "
            f"moeless"
        )
    return np.minimum(capacity_D, experts)


def counts_of(task: PlacementTask, load_E: LoadArray) -> CountArray:
    """Whole tokens of a layer [E], for a splitter.

    Under a time model they are those of the mean step: what touching an expert costs depends on
    how few tokens share it. Otherwise only proportions matter, so fractions are scaled up.
    """
    if not task.scalable:
        return np.rint(load_E / task.loads.steps).astype(np.int64)
    total = float(load_E.sum())
    whole = task.loads.loads_LE.dtype.kind == "i" or total == 0
    return np.rint(load_E if whole else load_E * max(1.0, _WHOLE / total)).astype(np.int64)


def balance(task: PlacementTask, tokens_ED: CountArray) -> float | None:
    """How near a split is to the best, 1 being perfect; None without any token.

    Args:
        task: Says whether tokens or time count.
        tokens_ED: Tokens of each replica, int64 [E, D].

    Returns:
        Mean / max device tokens; under a time model, the least time that any lossless split could
        take / the layer's time.
    """
    tokens_D = tokens_ED.sum(axis=0)
    if not tokens_D.any():
        return None
    if task.timed:
        bound_s = task.cost.bound_s(tokens_ED.sum(axis=1), len(tokens_D))
        return bound_s / task.cost.layer_s(tokens_ED)
    return float(tokens_D.mean() / tokens_D.max())


def _even_balance(
    task: PlacementTask, load_E: LoadArray, replicas_ED: ReplicaArray
) -> float | None:
    """``balance`` of an even split; tokens in fractions, so that loads alone decide."""
    if task.timed:
        even: Splitter = SPLITTERS.create("even")
        return balance(task, even.split(counts_of(task, load_E), replicas_ED.astype(np.bool_)))
    tokens_D = (load_E / replicas_ED.sum(axis=1, dtype=np.int64)) @ replicas_ED
    most = float(tokens_D.max())
    return float(tokens_D.mean()) / most if most > 0 else None


def _static_ED(task: PlacementTask) -> ReplicaArray:
    experts, devices = task.loads.num_experts, task.num_devices
    empty_ED = np.zeros((experts, devices), dtype=np.uint8)
    request = PlanRequest(
        step=0,
        layer=0,
        load_E=np.zeros(experts),
        previous_ED=empty_ED,
        alive_ED=empty_ED,
        capacity_D=np.full(devices, experts, dtype=np.int64),
    )
    return PLANNERS.create("static").plan(request).replicas_ED


def _plan_layer(
    task: PlacementTask, row: int, policies: PolicySet, capacity_D: CountArray
) -> tuple[ReplicaArray, ReplicaArray]:
    """The layer's placement in force and the planned one."""
    load_E = task.loads.loads_LE[row].astype(np.float64)
    before_ED = _current_ED(task, row)
    fits = (before_ED.sum(axis=0, dtype=np.int64) <= capacity_D).all()
    if fits and not load_E.any():
        return before_ED, before_ED  # nothing speaks for moving anything
    request = PlanRequest(
        step=0,
        layer=task.loads.layer_ids[row],
        load_E=load_E,
        previous_ED=before_ED,
        alive_ED=before_ED,
        capacity_D=capacity_D,
    )
    try:
        planned_ED = policies.planner.plan(request).replicas_ED
    except PlanError as error:  # the loads are good, so it is the devices or slots
        raise ConfigError(f"{policies.name}: {error}") from error
    # A second copy on the same device would only waste its slot: a placement leaves it empty.
    return before_ED, (planned_ED > 0).astype(np.uint8)


def _current_ED(task: PlacementTask, row: int) -> ReplicaArray:
    current = task.current
    if current is None:
        return _static_ED(task)
    layer = task.loads.layer_ids[row]
    found = (current.num_experts, current.num_devices)
    if layer not in current.layer_ids or found != (task.loads.num_experts, task.num_devices):
        raise ConfigError(
            f"--current has {found[0]} experts on {found[1]} devices in layers "
            f"{current.layer_ids[0]} to {current.layer_ids[-1]}, but the loads are of "
            f"{task.loads.num_experts} experts and layer {layer} on {task.num_devices} devices"
        )
    held_ED: ReplicaArray = current.replicas_LED[current.layer_ids.index(layer)]
    return held_ED


def _describe(
    task: PlacementTask,
    row: int,
    before_ED: ReplicaArray,
    replicas_ED: ReplicaArray,
    filled: int,
) -> LayerPlan:
    load_E = task.loads.loads_LE[row].astype(np.float64)
    count_E = counts_of(task, load_E)
    min_time: Splitter = SPLITTERS.create("min_time", cost=task.cost)
    usable_ED = replicas_ED.astype(np.bool_)
    return LayerPlan(
        layer_id=task.loads.layer_ids[row],
        load_E=load_E,
        replicas_ED=replicas_ED,
        static=_even_balance(task, load_E, _static_ED(task)),
        even=_even_balance(task, load_E, replicas_ED),
        min_time=balance(task, min_time.split(count_E, usable_ED)),
        copies=int(((replicas_ED > 0) & (before_ED == 0)).sum()),
        filled=filled,
    )
