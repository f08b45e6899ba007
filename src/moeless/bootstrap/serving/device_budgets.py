"""How much memory of each device the experts of a model may take, where no pool says so."""

import numpy as np

from moeless.bootstrap.policies import PolicyOptions
from moeless.config import ExpertsConfig
from moeless.core.model import ModelSpec
from moeless.errors import BudgetError
from moeless.functions.compute.experts import function_bytes


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
