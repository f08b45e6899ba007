"""Fixed slots: equally many on every device, as EPLB and its kin assume."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import MAX_COPIES, CountArray, LoadArray, PlanRequest, ReplicaArray
from moeless.errors import ConfigError, PlanError
from moeless.policies.planners.feasibility import checked_capacity


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """The slots of one layer.

    Args:
        num_experts: E.
        num_devices: D, those without slots included.
        devices: Devices that have slots, ascending.
        per_device: Slots of each of them, at most E.
    """

    num_experts: int
    num_devices: int
    devices: tuple[int, ...]
    per_device: int

    @property
    def num_slots(self) -> int:
        """R, slots in all."""
        return self.per_device * len(self.devices)

    def copies_ED(self, slots_R: NDArray[np.int64]) -> ReplicaArray:
        """Slots that each device spends on each expert, uint8 [E, D]; at most ``MAX_COPIES``.

        Args:
            slots_R: Expert of each slot [R], device by device.
        """
        copies: CountArray = np.zeros((self.num_experts, self.num_devices), dtype=np.int64)
        np.add.at(copies, (slots_R, np.repeat(self.devices, self.per_device)), 1)
        return np.minimum(copies, MAX_COPIES).astype(np.uint8)

    def initial_slots_R(self) -> NDArray[np.int64]:
        """Where nothing is known: experts in index order, over and over, [R].

        Every expert has its turn before any has a second one, and no device holds one twice. vLLM
        and SGLang start their EPLB like this.
        """
        return np.arange(self.num_slots, dtype=np.int64) % self.num_experts


def check_memory_factor(memory_factor: float, *, planner: str) -> None:
    """Refuse a memory factor that no layer could have.

    Raises:
        ConfigError: It is below 1 or not finite.
    """
    if not (math.isfinite(memory_factor) and memory_factor >= 1.0):
        raise ConfigError(
            f"planner {planner}: memory_factor {memory_factor} is not a finite number of at "
            f"least 1 (one replica per expert); use for example 2.0"
        )


def lay_out_slots(request: PlanRequest, *, memory_factor: float, planner: str) -> SlotLayout:
    """Say how many slots the devices have.

    In all they are ``memory_factor`` x E, rounded up to a multiple of the devices, or as many as
    the smallest device allows. Devices without any capacity (out of service) have none.

    Args:
        request: The request.
        memory_factor: Slots of the layer as a multiple of E, at least 1.
        planner: Name of the planner, for the message.

    Raises:
        PlanError: The capacities cannot hold one replica of each expert, or not with equally many
            slots per device.
    """
    capacity = checked_capacity(request)
    experts = request.num_experts
    devices = tuple(device for device, slots in enumerate(capacity) if slots > 0)
    # The small subtrahend keeps 1.1 x 10 (11.000000000000002 in binary) at 11.
    wanted = math.ceil(memory_factor * experts - 1e-9)
    smallest = min(devices, key=capacity.__getitem__)
    per_device = min(-(-wanted // len(devices)), capacity[smallest])
    if per_device * len(devices) < experts:
        raise PlanError(
            f"layer {request.layer}: {planner} gives each of {len(devices)} devices equally many "
            f"slots, but device {smallest} holds {per_device} and {experts} experts need "
            f"{-(-experts // len(devices))}; raise its memory budget or use another planner"
        )
    return SlotLayout(
        num_experts=experts,
        num_devices=request.num_devices,
        devices=devices,
        per_device=per_device,
    )


def standing_ED(request: PlanRequest) -> ReplicaArray | None:
    """The plan in force with its copies, if it can stay as it is; uint8 [E, D].

    None before the first plan, and where it misses an expert or no longer fits the devices.
    """
    previous_ED = request.previous_ED
    covers = previous_ED.any(axis=1).all()
    fits = (previous_ED.sum(axis=0, dtype=np.int64) <= request.capacity_D).all()
    return previous_ED if covers and fits else None


def knows_nothing(load_E: LoadArray) -> bool:
    """Whether loads tell no expert from another."""
    return bool((load_E == load_E[0]).all())


def expected_load_D(load_E: LoadArray, copies_ED: NDArray[np.generic]) -> LoadArray:
    """Tokens per device when each expert's are divided evenly over its slots, float64 [D].

    A device that holds an expert twice gets two shares.

    Args:
        load_E: Tokens per expert [E].
        copies_ED: Slots that each device spends on each expert, any dtype [E, D]; at least one per
            expert that has tokens.
    """
    copies = copies_ED.astype(np.float64)
    load_D: LoadArray = (load_E / np.maximum(copies.sum(axis=1), 1.0)) @ copies
    return load_D
