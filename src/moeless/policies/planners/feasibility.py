"""Whether a layer's experts fit on the devices at all.

What all planners must check before they decide anything.
"""

from moeless.core.plan import PlanRequest
from moeless.errors import PlanError


def checked_capacity(request: PlanRequest) -> list[int]:
    """Validate the capacities of a request.

    Args:
        request: The request; ``capacity_D`` may exceed what a device can use.

    Returns:
        Replicas of this layer that each device may hold, at most E (no device holds two replicas
        of one expert).

    Raises:
        PlanError: No device, a negative capacity, arrays that do not match, or fewer slots than
            experts.
    """
    experts, devices = request.num_experts, request.num_devices
    for name, array in (("previous_ED", request.previous_ED), ("alive_ED", request.alive_ED)):
        if array.shape != (experts, devices):
            raise PlanError(
                f"layer {request.layer}: {name} has shape {array.shape}, "
                f"expected ({experts}, {devices})"
            )
    capacity = [min(slots, experts) for slots in request.capacity_D.tolist()]
    if capacity and min(capacity) < 0:
        device = capacity.index(min(capacity))
        raise PlanError(
            f"layer {request.layer}, device {device}: capacity {capacity[device]} is negative"
        )
    if sum(capacity) < experts:
        raise PlanError(
            f"layer {request.layer}: {devices} devices hold {sum(capacity)} replicas in all, "
            f"{experts} experts need at least {experts}; raise the device memory budget or add "
            f"devices"
        )
    return capacity
