"""Devices that costs are computed for, and where each number comes from.

Figures are peak rates of one device, one way, in decimal units (GB = 10^9 bytes). This module
must not know models or experts.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from moeless.errors import ConfigError

GB: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class DevicePreset:
    """One kind of device and its links.

    Args:
        name: How it is asked for.
        memory_bytes: Memory of one device.
        memory_bandwidth_bytes_s: Reading its own memory.
        flops: Dense bfloat16 operations per second.
        host_link_bytes_s: Host memory to device.
        device_link_bytes_s: To the other devices, one way; what the all-to-all runs over.
        store_bytes_s: Checkpoint store to host memory.
        source: Where each number comes from, by field name.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_s: float
    flops: float
    host_link_bytes_s: float
    device_link_bytes_s: float
    store_bytes_s: float
    source: MappingProxyType[str, str]


_NVME: Final = "assumed: sequential read of one PCIe 4.0 NVMe drive"

DEVICES: Final = MappingProxyType(
    {
        "h200": DevicePreset(
            name="h200",
            memory_bytes=141 * GB,
            memory_bandwidth_bytes_s=4.8e12,
            flops=989.4e12,
            host_link_bytes_s=64e9,
            device_link_bytes_s=450e9,
            store_bytes_s=7e9,
            source=MappingProxyType(
                {
                    "memory_bytes": "NVIDIA H200 SXM data sheet: 141 GB",
                    "memory_bandwidth_bytes_s": "NVIDIA H200 SXM data sheet: 4.8 TB/s",
                    "flops": "NVIDIA H200 SXM data sheet: 1,979 TFLOPS bfloat16 with sparsity, "
                    "half of it dense",
                    "host_link_bytes_s": "PCIe 5.0 x16: 128 GB/s both ways, half of it one way",
                    "device_link_bytes_s": "NVLink 4: 900 GB/s both ways, half of it one way",
                    "store_bytes_s": _NVME,
                }
            ),
        ),
        "a6000": DevicePreset(
            name="a6000",
            memory_bytes=48 * GB,
            memory_bandwidth_bytes_s=768e9,
            flops=154.8e12,
            host_link_bytes_s=32e9,
            device_link_bytes_s=56.25e9,
            store_bytes_s=7e9,
            source=MappingProxyType(
                {
                    "memory_bytes": "the MoEless paper, section 6.1: 48 GB",
                    "memory_bandwidth_bytes_s": "NVIDIA RTX A6000 data sheet: 768 GB/s",
                    "flops": "NVIDIA RTX A6000 data sheet: 309.7 TFLOPS tensor performance with "
                    "sparsity, half of it dense",
                    "host_link_bytes_s": "the MoEless paper, section 6.1: 64 GB/s both ways, half "
                    "of it one way",
                    "device_link_bytes_s": "NVLink bridge of the RTX A6000: 112.5 GB/s both ways, "
                    "half of it one way; a bridge joins two GPUs, so an all-to-all over eight "
                    "would be bound by PCIe and be slower",
                    "store_bytes_s": _NVME,
                }
            ),
        ),
        "cpu": DevicePreset(
            name="cpu",
            memory_bytes=64 * GB,
            memory_bandwidth_bytes_s=25e9,
            flops=0.7e12,
            host_link_bytes_s=10e9,
            device_link_bytes_s=10e9,
            store_bytes_s=4e9,
            source=MappingProxyType(
                {
                    "memory_bytes": "rough: a small server",
                    "memory_bandwidth_bytes_s": "measured: weights that one core of an AMD EPYC "
                    "(Zen 5) reads while it multiplies few rows, 23 GB/s for experts of 11 MB, "
                    "33 GB/s for 0.2 MB; see docs/log.md",
                    "flops": "so that a token takes what one such core takes with bfloat16, about "
                    "200 billion multiplications a second",
                    "host_link_bytes_s": "rough: one core copying memory to memory",
                    "device_link_bytes_s": "rough: one core copying through shared memory",
                    "store_bytes_s": "rough: one core reading files that are in the page cache",
                }
            ),
        ),
    }
)


def device_preset(name: str) -> DevicePreset:
    """Find a preset.

    Args:
        name: ``h200``, ``a6000`` or ``cpu``.

    Raises:
        ConfigError: No such preset.
    """
    preset = DEVICES.get(name)
    if preset is None:
        raise ConfigError(f"device preset {name!r} is unknown; use {', '.join(DEVICES)}")
    return preset
