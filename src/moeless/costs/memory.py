"""Whether the replicas of a model's experts fit into the memory of the devices."""

import math
from dataclasses import dataclass

from moeless.costs.models import ModelShape
from moeless.costs.presets import GB
from moeless.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """What a placement needs and what there is.

    Args:
        needed: Replicas to be held, over all layers.
        seats: Replicas that the devices can hold together, whole ones only.
        reason: One line with the numbers, whether it fits or not.
    """

    needed: int
    seats: int
    reason: str

    @property
    def fits(self) -> bool:
        """Whether every replica has a seat."""
        return self.needed <= self.seats


def fit_in_memory(
    model: ModelShape,
    *,
    memory_factor: float,
    num_devices: int,
    device_bytes: int,
    other_bytes: int = 0,
) -> MemoryFit:
    """Compare a placement with the devices' memory.

    Args:
        model: The model.
        memory_factor: F; every layer holds F x E replicas, rounded up.
        num_devices: D.
        device_bytes: Memory of each device.
        other_bytes: What each device holds besides experts: other weights, caches, workspace.

    Raises:
        ConfigError: F or D is not positive, or a size is negative.
    """
    if not (math.isfinite(memory_factor) and memory_factor > 0) or num_devices < 1:
        raise ConfigError(
            f"memory: factor {memory_factor} on {num_devices} devices; use positive numbers"
        )
    if device_bytes < 0 or other_bytes < 0:
        raise ConfigError("memory: a number of bytes is negative")
    expert = model.expert.num_bytes
    needed = model.num_layers * math.ceil(memory_factor * model.num_experts)
    seats = num_devices * (max(device_bytes - other_bytes, 0) // expert)
    return MemoryFit(
        needed=needed,
        seats=seats,
        reason=(
            f"{model.name} with {memory_factor:g} replicas per expert: {needed} replicas of "
            f"{expert / GB:.3g} GB are {needed * expert / GB:.4g} GB; {num_devices} devices of "
            f"{device_bytes / GB:.4g} GB, less {other_bytes / GB:.4g} GB each for other things, "
            f"hold {seats}"
        ),
    )


def require_memory(fit: MemoryFit) -> None:
    """Refuse a placement that does not fit.

    Raises:
        ConfigError: It does not fit; with the numbers and the ways out.
    """
    if not fit.fits:
        raise ConfigError(
            f"{fit.reason}; use a smaller memory factor, more devices or larger ones"
        )
