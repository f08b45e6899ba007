"""Facts about a model's functions, from its configuration and its weights' headers."""

import math
from typing import Any

from moeless.bootstrap.serving.engine import find_model
from moeless.core.cluster import Device
from moeless.errors import ModelError


def inspect_model(
    name: str, devices: tuple[Device, ...], *, budget_bytes: int | None
) -> dict[str, Any]:
    """Describe a model.

    Args:
        name: A directory, a hub id, or ``demo``.
        devices: The device pool.
        budget_bytes: Budget of each device, or None.

    Returns:
        Facts by name, ready for JSON; sizes in bytes.

    Raises:
        CheckpointError: The model cannot be read, or a weight is missing.
        ModelError: A dense model, an unknown family, or no tokenizer.
    """
    directory = find_model(name)
    from moeless.engines.transformers.loader import describe_model
    from moeless.functions.host.host import function_bytes
    from moeless.functions.store import ExpertStore

    described = describe_model(directory)
    if described.tokenizer is None:  # as start_engine says
        raise ModelError(f"{directory} has no tokenizer; add tokenizer.json and its configuration")
    spec = described.spec
    with ExpertStore(directory, described.layout, spec) as store:
        store.validate()
    per_function = function_bytes(spec.expert, devices[0].torch_name)
    facts: dict[str, Any] = {
        "model": spec.model_id,
        "family": spec.family,
        "moe_layers": spec.num_layers,
        "experts_per_layer": spec.num_experts,
        "experts_per_token": spec.top_k,
        "expert_shape": f"{spec.expert.hidden} x {spec.expert.intermediate} {spec.expert.dtype}",
        "stored_as": described.layout.gate_up.codec,
        "functions": spec.num_functions,
        "parameters_per_function": spec.expert.num_parameters,
        "bytes_per_function": per_function,
        "of_which_padding": per_function - spec.expert.num_bytes,
        "bytes_of_one_layer": per_function * spec.num_experts,
        "bytes_of_all_functions": per_function * spec.num_functions,
        "least_bytes_per_device": math.ceil(spec.num_experts / len(devices)) * per_function,
        "devices": len(devices),
    }
    if budget_bytes is not None:
        slots = budget_bytes // per_function * len(devices)
        facts |= {
            "budget_bytes_per_device": budget_bytes,
            "functions_that_fit": slots,
            "copies_of_all_experts": round(slots / spec.num_functions, 2),
            "serves": slots >= spec.num_experts,
        }
    return facts
