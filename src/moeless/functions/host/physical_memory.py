"""What a device of this machine can hold at most, whatever its budget says. Needs no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from moeless.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_bytes(*, cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """Memory of this machine, or of the container that this process runs in, bytes.

    Args:
        cgroups: Where the system's control groups are mounted.
        own_cgroups: The file that says which of them this process is in.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(cgroups, own_cgroups)])


def check_budget(num_bytes: int, *, kind: str, option: str) -> None:
    """Refuse a budget that can only be a slip: a CPU device with more memory than there is.

    A budget takes nothing until it is filled, so several devices may have more between them.

    Args:
        num_bytes: The budget of one device.
        kind: ``cpu``, or ``cuda`` whose memory only torch knows.
        option: What it was given by, for the error.

    Raises:
        ConfigError: The budget is larger.
    """
    most = usable_bytes()
    if kind == "cpu" and num_bytes > most:
        raise ConfigError(
            f"{option} of {num_bytes:,} bytes for each CPU device is more than the {most:,} bytes "
            f"of memory that this machine, or the container's limit, has; give less"
        )


def _limits(cgroups: Path, own_cgroups: Path) -> Iterator[int]:
    """Limits of this process's control groups and of those around them; version 1 and 2."""
    try:
        lines = own_cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # A container may see only its own group, as the root, under a path from outside.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit = (folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if limit.isdigit():  # "max" is none
                yield int(limit)
