"""The part of each device's memory that a model is guaranteed."""

import math
from dataclasses import dataclass

from moeless.core.cluster import parse_bytes
from moeless.errors import ConfigError

_HELP = "use a part of each device such as 25% or 0.25, or bytes such as 512MB"


@dataclass(frozen=True, kw_only=True)
class MemoryShare:
    """A guarantee, the same on every device.

    Args:
        fraction: Part of the device's budget, 0 to 1.
        num_bytes: Bytes of it; added to the fraction.

    Raises:
        ConfigError: A number is out of range.
    """

    fraction: float = 0.0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fraction) and 0 <= self.fraction <= 1):
            raise ConfigError(f"memory share is {self.fraction:.0%} of a device; {_HELP}")
        if self.num_bytes < 0:
            raise ConfigError(f"memory share is {self.num_bytes} bytes; {_HELP}")

    def bytes_of(self, budget_bytes: int) -> int:
        """What is guaranteed on a device with this budget."""
        return int(self.fraction * budget_bytes) + self.num_bytes

    def __str__(self) -> str:
        """As an operator writes it."""
        if self.num_bytes:
            return f"{self.num_bytes:,} bytes"
        return f"{self.fraction:.0%}"


NO_SHARE = MemoryShare()
"""Nothing is guaranteed."""


def parse_share(text: str) -> MemoryShare:
    """Read ``--memory-share``: ``25%``, ``0.25`` or ``512MB``.

    Raises:
        ConfigError: It is none of these.
    """
    text = text.strip()
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        return MemoryShare(num_bytes=parse_bytes(text, option="--memory-share"))
    if not math.isfinite(value):
        raise ConfigError(f"--memory-share {text!r} is no share; {_HELP}")
    if number == text and value > 1:
        raise ConfigError(f"--memory-share {text!r} is more than all of a device; {_HELP}")
    return MemoryShare(fraction=value if number == text else value / 100)
