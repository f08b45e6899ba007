"""All families, and the choice of one by a model's configuration."""

from collections.abc import Mapping
from typing import Any

from moeless.engines.transformers.families.base import Family
from moeless.engines.transformers.families.deepseek_v3 import DeepseekV3
from moeless.engines.transformers.families.gpt_oss import GptOss
from moeless.engines.transformers.families.granitemoeshared import GraniteMoeShared
from moeless.engines.transformers.families.llama4 import Llama4
from moeless.engines.transformers.families.mixtral import Mixtral
from moeless.engines.transformers.families.olmoe import Olmoe
from moeless.engines.transformers.families.phimoe import PhiMoe
from moeless.engines.transformers.families.qwen3_moe import Qwen3Moe
from moeless.errors import ModelError

FAMILIES: tuple[Family, ...] = (
    Mixtral(),
    PhiMoe(),
    Llama4(),
    Qwen3Moe(),
    Olmoe(),
    GptOss(),
    DeepseekV3(),
    GraniteMoeShared(),
)
"""Every family that can be served."""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def family_for(config: Any) -> Family:
    """Find the family of a model.

    Args:
        config: A transformers configuration, or the mapping of a ``config.json``.

    Raises:
        ModelError: The model is dense, or of a family that is not known here.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    model_type = str(fields.get("model_type", ""))
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    name = model_type or "a model without model_type"
    counts = [fields.get(key) for key in _EXPERT_COUNTS]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        raise ModelError(f"{name} is a dense model: no experts to serve")
    known = ", ".join(sorted(kind for family in FAMILIES for kind in family.model_types))
    raise ModelError(f"{name} is a Mixture of Experts of an unknown family; known are {known}")
