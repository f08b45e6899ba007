"""Devices that can hold and run expert functions."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from moeless.errors import ConfigError

_MOST_SPEED = 1000.0
_HELP = "use for example cpu:2 (two CPU workers), cuda:0 or cuda:0,1"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of the pool.

    Args:
        index: Position in the pool, from 0.
        kind: ``cpu`` or ``cuda``.
        ordinal: Which of its kind: the CUDA device number, or the CPU worker's number.
    """

    index: int
    kind: Literal["cpu", "cuda"]
    ordinal: int

    @property
    def torch_name(self) -> str:
        """The name torch knows it by."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.ordinal}"

    @property
    def label(self) -> str:
        """A short unique name for tables and metric labels."""
        return f"{self.kind}:{self.ordinal}"


def parse_devices(text: str) -> tuple[Device, ...]:
    """Read a device string.

    Args:
        text: ``cpu:N`` for N CPU workers (``cpu`` is one), ``cuda:0,1`` for GPUs by number.

    Raises:
        ConfigError: Anything else, zero devices, or a GPU named twice.
    """
    text = text.strip()
    if match := re.fullmatch(r"cpu(?::(\d{1,4}))?", text):
        count = int(match[1]) if match[1] is not None else 1
        if count < 1:
            raise ConfigError(f"--devices {text!r} asks for no device; {_HELP}")
        return tuple(Device(index=i, kind="cpu", ordinal=i) for i in range(count))
    if match := re.fullmatch(r"cuda:(\d{1,4}(?:,\d{1,4})*)", text):
        ordinals = [int(part) for part in match[1].split(",")]
        if len(set(ordinals)) != len(ordinals):
            raise ConfigError(f"--devices {text!r} names a GPU twice; {_HELP}")
        return tuple(Device(index=i, kind="cuda", ordinal=o) for i, o in enumerate(ordinals))
    raise ConfigError(f"--devices {text!r} is not a device string; {_HELP}")


def parse_device(text: str) -> Device:
    """Read one more device: ``cpu``, or ``cuda:N`` for the GPU of that number.

    Raises:
        ConfigError: Anything else.
    """
    if text == "cpu":
        return Device(index=0, kind="cpu", ordinal=0)
    if match := re.fullmatch(r"cuda:(\d{1,4})", text):
        return Device(index=0, kind="cuda", ordinal=int(match[1]))
    raise ConfigError(
        f"{text!r} is not a device that can be added; use cpu, or for example cuda:1"
    )


def parse_speeds(text: str, num_devices: int) -> tuple[float, ...]:
    """Read the relative speeds of devices, such as ``1,1,0.5,0.5``.

    Args:
        text: A number from 0.001 to 1000 for each device.
        num_devices: D.

    Raises:
        ConfigError: Not a speed, or not one for each device.
    """
    speeds = []
    for part in text.split(","):
        try:
            speed = float(part)
        except ValueError:
            speed = math.nan
        if not 1 / _MOST_SPEED <= speed <= _MOST_SPEED:
            raise ConfigError(
                f"--device-speeds {text!r}: {part.strip()!r} is not a speed from 0.001 to 1000; "
                f"use for example 1,1,0.5,0.5"
            )
        speeds.append(speed)
    if len(speeds) != num_devices:
        raise ConfigError(
            f"--device-speeds names {len(speeds)} speeds for {num_devices} devices; give one each"
        )
    return tuple(speeds)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str, *, option: str) -> int:
    """Read a size such as ``512MB``, ``1.5GiB`` or ``1048576``.

    Args:
        text: The size.
        option: The option's name, for the error message.

    Raises:
        ConfigError: Not a positive size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise ConfigError(f"{option} {text!r} is not a size; use for example 512MB or 1.5GiB")
    return size
