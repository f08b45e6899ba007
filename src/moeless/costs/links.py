"""How long bytes take between store, host memory and devices.

Links are taken at their rate, without contention: whoever schedules several loads on one link
must queue them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeless.core.plan import CountArray
from moeless.costs.presets import DevicePreset
from moeless.errors import ConfigError

Tier = Literal["host", "store"]


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Rates of the links, one way, in bytes per second.

    Args:
        host_bytes_s: Host memory to device.
        store_bytes_s: Store to host memory.
        device_bytes_s: Device to the other devices.

    Raises:
        ConfigError: A rate is not positive.
    """

    host_bytes_s: float
    store_bytes_s: float
    device_bytes_s: float

    def __post_init__(self) -> None:
        for name in ("host_bytes_s", "store_bytes_s", "device_bytes_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"links: {name} is {value}; use a positive number of bytes/s")

    @classmethod
    def of(cls, device: DevicePreset) -> "LinkTimes":
        """The links of a preset."""
        return cls(
            host_bytes_s=device.host_link_bytes_s,
            store_bytes_s=device.store_bytes_s,
            device_bytes_s=device.device_link_bytes_s,
        )

    def load_s(self, num_bytes: int, tier: Tier) -> float:
        """Seconds until weights are on a device.

        Args:
            num_bytes: Their size.
            tier: Where they are: ``host`` memory, or only in the ``store``, from where they are
                read into host memory first.
        """
        to_device_s = num_bytes / self.host_bytes_s
        return to_device_s if tier == "host" else num_bytes / self.store_bytes_s + to_device_s

    def all_to_all_s(self, tokens_D: CountArray, *, token_bytes: int) -> float:
        """Seconds of one exchange: the device with the most tokens ends last.

        Args:
            tokens_D: Tokens that each device receives, or sends back, int64 [D].
            token_bytes: Bytes of one hidden state.
        """
        return int(np.max(tokens_D, initial=0)) * token_bytes / self.device_bytes_s
