"""A placement of all layers: which experts each device holds.

This module must not know any file format.
"""

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from moeless.errors import ConfigError, TraceError

SlotRows = list[list[int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Replicas of all MoE layers.

    Args:
        layer_ids: Absolute index of each layer in the model, ascending, length L.
        replicas_LED: 1 where a replica of expert e is on device d, uint8 [L, E, D].

    Raises:
        TraceError: Shapes that do not match, or an expert without any replica.
    """

    layer_ids: tuple[int, ...]
    replicas_LED: NDArray[np.uint8]

    def __post_init__(self) -> None:
        shape = self.replicas_LED.shape
        if len(shape) != 3 or 0 in shape or shape[0] != len(self.layer_ids):
            raise TraceError(f"placement: shape {shape} for {len(self.layer_ids)} layers")
        placed_LE = self.replicas_LED.any(axis=2)
        if not placed_LE.all():
            layer, expert = np.argwhere(~placed_LE)[0]
            raise TraceError(
                f"placement: layer {self.layer_ids[layer]}, expert {expert} is on no device"
            )

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.replicas_LED.shape[1])

    @property
    def num_devices(self) -> int:
        """D."""
        return int(self.replicas_LED.shape[2])

    def experts_on(self, row: int, device: int) -> list[int]:
        """Experts that a device holds of the layer in a row, ascending."""
        held: list[int] = np.flatnonzero(self.replicas_LED[row, :, device]).tolist()
        return held


def slot_rows(placement: Placement, *, system: str) -> SlotRows:
    """Lay a placement out in slots: device by device, the same number on each.

    Args:
        placement: The placement.
        system: Whose format it is for, for the message.

    Returns:
        The expert of each slot, one row per layer.

    Raises:
        ConfigError: Devices hold different numbers of replicas, which the format cannot say.
    """
    held_LD = placement.replicas_LED.sum(axis=1, dtype=np.int64)
    uneven = np.argwhere(held_LD != held_LD[0, 0])
    if uneven.size:
        layer, device = uneven[0]
        raise ConfigError(
            f"{system} has the same number of slots on every device and layer, but layer "
            f"{placement.layer_ids[0]} has {held_LD[0, 0]} on device 0 and layer "
            f"{placement.layer_ids[layer]} has {held_LD[layer, device]} on device {device}; use "
            f"a number of slots that the devices divide, or --output json"
        )
    devices = range(placement.num_devices)
    return [
        [expert for device in devices for expert in placement.experts_on(row, device)]
        for row in range(len(placement.layer_ids))
    ]


def from_slot_rows(
    rows: SlotRows, layer_ids: tuple[int, ...], *, num_devices: int, source: str
) -> Placement:
    """Read slots as a placement. Two slots of a device with one expert count once.

    Args:
        rows: The expert of each slot, one row per layer.
        layer_ids: Absolute layers.
        num_devices: D; each device has the same number of successive slots.
        source: The file, for messages.

    Raises:
        TraceError: Rows of unequal length, slots that the devices do not divide, or ids that are
            none.
    """
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise TraceError(f"{source}: layers have {sorted(widths)} slots, expected one number")
    slots = widths.pop()
    if slots % num_devices:
        raise TraceError(
            f"{source}: {slots} slots are not divided by {num_devices} devices; name the number "
            f"of devices that it was made for"
        )
    experts_LP = np.asarray(rows, dtype=np.int64)
    # No expert can be missing, so a layer has at least as many slots as experts.
    if experts_LP.min() < 0 or experts_LP.max() >= slots:
        raise TraceError(
            f"{source}: expert ids from {experts_LP.min()} to {experts_LP.max()} in {slots} slots"
        )
    replicas_LED = np.zeros((len(rows), int(experts_LP.max()) + 1, num_devices), dtype=np.uint8)
    device_P = np.arange(slots) // (slots // num_devices)
    replicas_LED[np.arange(len(rows))[:, None], experts_LP, device_P[None, :]] = 1
    return Placement(layer_ids=layer_ids, replicas_LED=replicas_LED)


def is_id_rows(value: object) -> TypeGuard[SlotRows]:
    """Whether a value is a list of lists of whole numbers."""
    return isinstance(value, list) and all(
        isinstance(row, list)
        and all(isinstance(cell, int) and not isinstance(cell, bool) for cell in row)
        for row in value
    )
