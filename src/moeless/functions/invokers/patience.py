"""How long a worker may take for what it was sent, before it counts as stuck.

The limit follows the work, and what the device has shown: the same number of seconds is much too
long for a token and far too short for a long prompt on a slow processor. It is generous on
purpose: that a worker has stopped is found by its silence (``supervisor/vital_signs.py``), this
finds one that lives but does not get on.
"""

from dataclasses import dataclass

_LEAST_S = 10.0
"""However little was asked: a machine may be busy with something else for seconds."""
_SLACK = 20.0
"""How many times as long as the slowest that was seen a device may take."""
_PRIOR_MACS_PER_S = 1e9
"""Of a device that has shown nothing; with the slack a twentieth of that, which is less than
emulated bfloat16 products on one busy core."""
NOTED_FROM_NS = 1_000_000
"""Shorter answers say more about the call than about the arithmetic."""
_FORGETTING = 0.05
"""How far the slowest rate seen moves towards a faster one, with each answer."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one device was sent.

    Args:
        rows: Assignments, one row of one expert each.
        experts: Experts whose weights are read for them.
    """

    rows: int
    experts: int


class Patience:
    """What devices have shown, and what may be expected of them.

    Args:
        expert_parameters: Of one expert: multiply-adds of a row, and as many numbers to be read.
        num_devices: D.
        most_s: No work may take longer.
    """

    def __init__(self, expert_parameters: int, *, num_devices: int, most_s: float) -> None:
        self._parameters = expert_parameters
        self._rate_D = [0.0] * num_devices  # multiply-adds a second; 0 where nothing is known
        self._most_s = most_s

    def note(self, device: int, work: Work, busy_ns: int) -> None:
        """A device has computed.

        Args:
            device: Which.
            work: What.
            busy_ns: How long it took, in nanoseconds, at least ``NOTED_FROM_NS``.
        """
        rate, known = self._macs(work) / (busy_ns * 1e-9), self._rate_D[device]
        if not known or rate <= known:
            self._rate_D[device] = rate
        else:
            self._rate_D[device] = known + _FORGETTING * (rate - known)

    def allowed_s(self, device: int, work: Work) -> float:
        """How long a device may take for some work, in seconds.

        Args:
            device: Which.
            work: What.
        """
        rate = self._rate_D[device] or _PRIOR_MACS_PER_S
        return min(self._most_s, _LEAST_S + _SLACK * self._macs(work) / rate)

    def _macs(self, work: Work) -> float:
        """Multiply-adds; reading an expert's weights counts as a row of it."""
        return float(self._parameters) * (work.rows + work.experts)
