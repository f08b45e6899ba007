"""Fills the slots of a placement, for systems that have equally many on every device and layer."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray, LoadArray, ReplicaArray
from moeless.errors import ConfigError


def equalise_slots(
    replicas_LED: NDArray[np.uint8], loads_LE: NDArray[np.generic], capacity_D: CountArray
) -> NDArray[np.uint8]:
    """Add replicas until every device of every layer has as many as the fullest.

    Args:
        replicas_LED: A placement [L, E, D], at least one replica per expert.
        loads_LE: Tokens [L, E]; such systems divide them evenly over the replicas.
        capacity_D: Replicas of a layer that each device may hold, int64 [D].

    Returns:
        The filled placement, uint8 [L, E, D].

    Raises:
        ConfigError: A device cannot hold as many as another one does.
    """
    width = int(replicas_LED.sum(axis=1, dtype=np.int64).max())
    if (width > capacity_D).any():
        device = int(np.argmax(width > capacity_D))
        raise ConfigError(
            f"this format has the same number of slots on every device, but device {device} has "
            f"{capacity_D[device]} and another one {width}; use a number of slots that the "
            f"{len(capacity_D)} devices divide, or --output json"
        )
    filled_LED = replicas_LED.copy()
    for row, filled_ED in enumerate(filled_LED):
        _fill(loads_LE[row].astype(np.float64), filled_ED, width)
    return filled_LED


def _fill(load_E: LoadArray, replicas_ED: ReplicaArray, width: int) -> None:
    """Add, device by device, the replica after which the hottest device has the fewest tokens."""
    while (free_D := width - replicas_ED.sum(axis=0, dtype=np.int64)).any():
        count_E = replicas_ED.sum(axis=1, dtype=np.int64)
        tokens_D = (load_E / count_E) @ replicas_ED
        device = int(np.argmin(np.where(free_D > 0, tokens_D, np.inf)))
        share_E = load_E / (count_E + 1)
        after_ED = tokens_D + replicas_ED * (share_E - load_E / count_E)[:, None]
        after_ED[:, device] += share_E
        hottest_E = np.where(replicas_ED[:, device] > 0, np.inf, after_ED.max(axis=1))
        replicas_ED[int(np.argmin(hottest_E)), device] = 1
