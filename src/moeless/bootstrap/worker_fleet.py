"""What an operator's options mean for workers: how many, with which budget, on which cores."""

import os

import numpy as np
import torch

from moeless.bootstrap.policies import PolicyOptions
from moeless.config import ExpertsConfig
from moeless.core.model import ModelSpec
from moeless.errors import BudgetError, ConfigError
from moeless.functions.host import function_bytes
from moeless.functions.supervisor.attachment import MAX_DEVICES
from moeless.functions.supervisor.config import WorkerConfig


def check_devices(config: ExpertsConfig) -> None:
    """Refuse devices that are not there, and more than an engine can be attached to.

    Raises:
        ConfigError: There are some.
    """
    if len(config.devices) > MAX_DEVICES:
        raise ConfigError(
            f"--devices names {len(config.devices)} devices; use at most {MAX_DEVICES}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in config.devices:
        if device.kind == "cuda" and device.ordinal >= count:
            raise ConfigError(
                f"device {device.label} is not there: torch sees {count} CUDA devices; "
                f"use --devices cpu:N or another GPU"
            )


def device_budgets(spec: ModelSpec, config: ExpertsConfig) -> list[int]:
    """Bytes that experts may take on each device [D].

    Without an explicit budget each device gets its share of ``memory_factor`` copies of all
    experts.

    Raises:
        BudgetError: The devices cannot hold one layer's experts at once.
    """
    num_devices = len(config.devices)
    sizes = [function_bytes(spec.expert, d.torch_name) for d in config.devices]
    if config.device_memory_bytes is None:
        factor = PolicyOptions(memory_factor=config.policy.memory_factor).fixed_memory_factor
        copies = min(factor, num_devices) * spec.num_experts
        slots = -(-int(np.ceil(copies)) // num_devices)
        return [slots * spec.num_layers * size for size in sizes]
    slots = sum(config.device_memory_bytes // size for size in sizes)
    if slots < spec.num_experts:
        least = -(-spec.num_experts // num_devices) * max(sizes)
        raise BudgetError(
            f"--device-memory {config.device_memory_bytes:,} bytes is too small: {num_devices} "
            f"devices hold {slots} experts of {max(sizes):,} bytes, but each layer of "
            f"{spec.model_id} has {spec.num_experts}; give at least {least:,} bytes"
        )
    return [config.device_memory_bytes] * num_devices


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
