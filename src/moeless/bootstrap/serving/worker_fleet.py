"""What an operator's options mean for workers: where they compute, and on which cores.

Without torch, unless GPUs are named.
"""

import os

from moeless.config import ExpertsConfig
from moeless.errors import ConfigError
from moeless.functions.host.physical_memory import check_budget
from moeless.functions.supervisor.attachment import MAX_DEVICES
from moeless.functions.supervisor.config import WorkerConfig


def check_devices(config: ExpertsConfig) -> None:
    """Refuse devices and budgets that cannot be had, and more than an engine can be attached to.

    Raises:
        ConfigError: There are some.
    """
    if max(len(config.devices), config.max_devices or 0) > MAX_DEVICES:
        raise ConfigError(
            f"--devices names {len(config.devices)} devices, --max-devices "
            f"{config.max_devices or len(config.devices)}; use at most {MAX_DEVICES}"
        )
    if config.invoker == "inline" and (config.max_devices or 0) > len(config.devices):
        raise ConfigError("with --invoker inline no device can join; leave out --max-devices")
    if config.invoker == "inline" and config.spare_workers:
        raise ConfigError(
            "with --invoker inline there are no workers to stand by for; leave out --spare-workers"
        )
    if config.device_memory_bytes is not None:
        for kind in {device.kind for device in config.devices}:
            check_budget(config.device_memory_bytes, kind=kind, option="--device-memory")
    if all(device.kind == "cpu" for device in config.devices):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in config.devices:
        if device.kind == "cuda" and device.ordinal >= count:
            raise ConfigError(
                f"device {device.label} is not there: torch sees {count} CUDA devices; "
                f"use --devices cpu:N or another GPU"
            )


def worker_configs(config: ExpertsConfig, budgets: list[int]) -> tuple[WorkerConfig, ...]:
    """Give each worker its cores: a slice of what this process may use, none twice if possible.

    Args:
        config: Devices and threads.
        budgets: Bytes of each device [D].
    """
    cores = sorted(os.sched_getaffinity(0))
    count = len(config.devices)
    threads = config.worker_threads or max(1, len(cores) // count)
    workers = []
    for i, (device, budget) in enumerate(zip(config.devices, budgets, strict=True)):
        own = tuple(dict.fromkeys(cores[(i * threads + t) % len(cores)] for t in range(threads)))
        workers.append(
            WorkerConfig(
                torch_device=device.torch_name,
                budget_bytes=budget,
                threads=threads,
                cores=own if device.kind == "cpu" else (),
                spin_us=_spin_us(config),
            )
        )
    return tuple(workers)


def _spin_us(config: ExpertsConfig) -> int:
    """Spinning pays only where it takes no core from somebody who computes."""
    if config.spin_us is not None:
        return config.spin_us
    return 50 if len(os.sched_getaffinity(0)) > len(config.devices) + 2 else 0
