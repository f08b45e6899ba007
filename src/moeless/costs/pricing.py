"""What running experts costs in GB·s, in accountings that must never be mixed.

billed
    Bytes of a function times the time it executes. A device's time is shared by the functions
    that it runs, so a layer's bill is one function's bytes times the time of its devices.
reserved
    Whole devices times wall time: what a serverful deployment pays.
paper
    The comparison of the MoEless paper, as far as its numbers let us infer it: for each
    layer-step, layer time times the other memory (M_misc) and the experts charged. Serverful
    systems are charged the experts of all layers, serverless ones that layer's replicas only.

The fourth, *resident*, needs events in time and is metered where functions live. GB is 10^9
bytes. This module must not know policies: it is told whether one is serverless.
"""

import math

import numpy as np
from numpy.typing import NDArray

from moeless.costs.presets import GB
from moeless.errors import ConfigError


def billed_gb_s(device_s_D: NDArray[np.float64], *, function_bytes: int) -> float:
    """GB·s that functions of one layer-step are billed.

    Args:
        device_s_D: How long each device executed, in seconds [D].
        function_bytes: Bytes of one function.
    """
    return float(np.sum(device_s_D)) * function_bytes / GB


def reserved_gb_s(wall_s: float, *, num_devices: int, device_bytes: int) -> float:
    """GB·s of reserved devices.

    Args:
        wall_s: Wall time, queueing and idle time included.
        num_devices: D.
        device_bytes: Memory of each device.
    """
    return wall_s * num_devices * device_bytes / GB


class PaperMeter:
    """The paper's accounting of one policy, layer-step by layer-step.

    Args:
        function_bytes: Bytes of one function.
        serverless: Whether only the running layer's replicas are charged.
        other_bytes: M_misc, memory besides experts, charged to everyone.

    Raises:
        ConfigError: A number of bytes is negative.
    """

    def __init__(self, *, function_bytes: int, serverless: bool, other_bytes: int = 0) -> None:
        if function_bytes < 0 or other_bytes < 0:
            raise ConfigError("paper accounting: a number of bytes is negative")
        self._function_bytes = function_bytes
        self._other_bytes = other_bytes
        self._serverless = serverless
        self._byte_s = 0.0

    def add(self, layer_s: float, *, layer_replicas: int, all_replicas: int) -> None:
        """Charge one layer of one step.

        Args:
            layer_s: Time of the layer in seconds.
            layer_replicas: Warm replicas of that layer.
            all_replicas: Warm replicas of all layers.

        Raises:
            ConfigError: The time is negative or not finite.
        """
        if not (math.isfinite(layer_s) and layer_s >= 0):
            raise ConfigError(f"paper accounting: layer time is {layer_s}; use 0 or more seconds")
        replicas = layer_replicas if self._serverless else all_replicas
        self._byte_s += layer_s * (self._other_bytes + replicas * self._function_bytes)

    @property
    def gb_s(self) -> float:
        """GB·s so far."""
        return self._byte_s / GB
