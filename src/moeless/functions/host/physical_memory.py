"""What a device of this machine can hold at most, whatever its budget says. Needs no torch."""

import os

from moeless.errors import ConfigError


def physical_bytes() -> int:
    """Memory of this machine, bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_budget(num_bytes: int, *, kind: str, option: str) -> None:
    """Refuse a budget that can only be a slip: a CPU device with more memory than the machine.

    A budget takes nothing until it is filled, so several devices may have more between them.

    Args:
        num_bytes: The budget of one device.
        kind: ``cpu``, or ``cuda`` whose memory only torch knows.
        option: What it was given by, for the error.

    Raises:
        ConfigError: The budget is larger.
    """
    most = physical_bytes()
    if kind == "cpu" and num_bytes > most:
        raise ConfigError(
            f"{option} of {num_bytes:,} bytes for each CPU device is more than this machine's "
            f"memory of {most:,} bytes; give less"
        )
