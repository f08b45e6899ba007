"""Speeds of devices that plans are made for: of what engines measure, what is clear and lasts.

Another speed in force has experts loaded elsewhere, so it must not follow noise. What engines say
is combined, speeds close to each other count as equal, a slow device has one of three speeds, and
a change is believed when it has been seen for long enough. Pure.
"""

import math

import numpy as np
from numpy.typing import NDArray

LASTS_S = 10.0
"""So long a device must be seen at an eighth of the others' speed before that is believed; twice
as long at a quarter, three times at half, which may still be somebody else's work on its core."""
_SLOW = 1.8
_SLOW_NO_MORE = 1.45
"""Times as long as the others: from where on a device is slow, and until when it stays so. Tokens
are divided otherwise from 1.5 on, which costs nothing; equal workers on busy cores reach that."""
_ANOTHER_SPEED = 1.7
"""Factor from a slow device's speed in force to what makes it have another one."""
_LEAST_SPEED = 0.125
_LONGEST_LOOK_S = 1.0
"""A longer pause between two looks counts for so much only: nothing was seen meanwhile."""
_UNKNOWN_WEIGHT = 0.2
"""A slow device that gets nothing cannot show that it has recovered; so slowly it is believed."""
_RELAPSE_S = 600.0
_MOST_RELAPSES = 5
"""Slow again within so long after a recovery, the next one must last twice as long, so often."""


class HeededSpeeds:
    """Relative speeds, 1 for all until one is clearly slower than the others.

    Args:
        num_devices: D.
        lasts_s: See ``LASTS_S``.
    """

    def __init__(self, num_devices: int, *, lasts_s: float = LASTS_S) -> None:
        self._lasts_s = lasts_s
        self._seen_s: float | None = None
        self._evidence_s_D = np.zeros(num_devices)
        self._toward_D = np.zeros(num_devices)
        self._recovered_s_D = np.full(num_devices, -math.inf)
        self._relapses_D = np.zeros(num_devices, dtype=np.int64)
        self.speed_D = np.ones(num_devices)
        """In force."""

    def hear(self, said_ND: NDArray[np.float64], *, now_s: float) -> bool:
        """Take what engines measure now.

        Args:
            said_ND: Speeds relative to the usual one, of each engine that has work; 0 where it
                does not know.
            now_s: The time.

        Returns:
            Whether other speeds are in force now.
        """
        passed_s = 0.0 if self._seen_s is None else min(_LONGEST_LOOK_S, now_s - self._seen_s)
        self._seen_s = now_s
        if not said_ND.any():
            return False  # nobody has work: nothing is seen
        changed = False
        for device, kept in enumerate(self.speed_D.tolist()):
            told = _agreed(said_ND[:, device])
            wanted = 1.0 if told is None else _level(told, kept)
            weight = _UNKNOWN_WEIGHT if told is None else 1.0
            if self._is_believed(device, wanted, kept, passed_s * weight):
                self._put_in_force(device, wanted, now_s)
                changed = True
        return changed

    def forget(self, device: int) -> bool:
        """A device has left; whoever comes in its place has not been seen yet.

        Returns:
            Whether other speeds are in force now.
        """
        changed = bool(self.speed_D[device] < 1.0)
        self.speed_D[device] = 1.0
        self._evidence_s_D[device] = 0.0
        self._relapses_D[device] = 0
        self._recovered_s_D[device] = -math.inf
        return changed

    def _is_believed(self, device: int, wanted: float, kept: float, passed_s: float) -> bool:
        """Count how long a change has been seen; what speaks against it counts back."""
        if wanted == kept:
            left_s = float(self._evidence_s_D[device]) - passed_s
            self._evidence_s_D[device] = max(0.0, left_s)
            return False
        toward = math.copysign(1.0, wanted - kept)
        if toward != self._toward_D[device]:
            self._toward_D[device], self._evidence_s_D[device] = toward, 0.0
        self._evidence_s_D[device] += passed_s
        if toward > 0:
            patience = 2.0 * 2.0 ** float(self._relapses_D[device])
        else:
            patience = 4.0 + math.log2(wanted)
        return bool(self._evidence_s_D[device] >= patience * self._lasts_s)

    def _put_in_force(self, device: int, speed: float, now_s: float) -> None:
        if speed == 1.0:
            self._recovered_s_D[device] = now_s
        elif self.speed_D[device] == 1.0:
            again = now_s - float(self._recovered_s_D[device]) < _RELAPSE_S
            relapses = int(self._relapses_D[device]) + 1 if again else 0
            self._relapses_D[device] = min(relapses, _MOST_RELAPSES)
        self.speed_D[device] = speed
        self._evidence_s_D[device] = 0.0


def _agreed(said_N: NDArray[np.float64]) -> float | None:
    """The median of those who know; of two in the middle the one by which less is to be done."""
    known = np.sort(said_N[said_N > 0])
    return float(known[len(known) // 2]) if len(known) else None


def _level(told: float, kept: float) -> float:
    """The speed that should be in force, given the one that is."""
    if told >= 1.0 / (_SLOW_NO_MORE if kept < 1.0 else _SLOW):
        return 1.0
    if kept < 1.0 and kept / _ANOTHER_SPEED < told < kept * _ANOTHER_SPEED:
        return kept
    level = 2.0 ** round(math.log2(max(told, _LEAST_SPEED)))
    return min(0.5, level)
