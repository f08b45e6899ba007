"""How much loads have brought onto each device, and how long they took: of one model, or of all.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.telemetry.percentiles import SampleWindow
from moeless.telemetry.snapshot import Timing

_NEWEST = 512
"""Loads of a device behind its percentiles."""


class LoadMeter:
    """Counts loads that ended well.

    Args:
        num_devices: D.
    """

    def __init__(self, num_devices: int) -> None:
        self._bytes_D = np.zeros(num_devices)
        self._busy_s_D = np.zeros(num_devices)
        self._took_s_D = [SampleWindow(_NEWEST) for _ in range(num_devices)]

    def note(self, device: int, *, num_bytes: int, took_s: float, busy_s: float) -> None:
        """A load has ended well.

        Args:
            device: Where.
            num_bytes: What it brought.
            took_s: From the order until the instance was warm.
            busy_s: What of that the device was not still at the load before it.
        """
        self._bytes_D[device] += num_bytes
        self._busy_s_D[device] += busy_s
        self._took_s_D[device].add(took_s)

    @property
    def counts_D(self) -> NDArray[np.int64]:
        """Loads of each device [D]."""
        return np.array([window.count for window in self._took_s_D], dtype=np.int64)

    @property
    def amounts(self) -> NDArray[np.float64]:
        """Bytes, seconds in which a device loaded, and sum of what loads took, [3 × D]."""
        took_s_D = [window.total for window in self._took_s_D]
        return np.concatenate([self._bytes_D, self._busy_s_D, took_s_D])

    def report(self, counts_D: Sequence[int], amounts: NDArray[np.float64]) -> dict[str, Any]:
        """As part of a model's report.

        Args:
            counts_D: What of ``counts_D`` is reported.
            amounts: What of ``amounts`` is.
        """
        bytes_D, busy_s_D, took_s_D = np.split(amounts, 3)
        timings = [asdict(Timing.of(window)) for window in self._took_s_D]
        return {
            "loaded_bytes_D": np.rint(bytes_D).astype(np.int64).tolist(),
            "loading_s_D": busy_s_D.tolist(),
            "cold_start_s_D": [
                timing | {"count": count, "total_s": total_s}
                for timing, count, total_s in zip(
                    timings, counts_D, took_s_D.tolist(), strict=True
                )
            ],
        }
