"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B), FP8 releases included."""

from typing import Any

from moeless.core.model import ExpertShape
from moeless.engines.transformers.families.base import shape_of
from moeless.engines.transformers.families.olmoe import Olmoe


class Qwen3Moe(Olmoe):
    """Stored and routed like OLMoE; some layers may be dense."""

    name = "qwen3_moe"
    model_types = ("qwen3_moe",)
    model_class = "Qwen3MoeForCausalLM"
    experts_class = "Qwen3MoeExperts"

    def layer_ids(self, config: Any) -> tuple[int, ...]:
        """Every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
        return tuple(
            layer
            for layer in range(config.num_hidden_layers)
            if layer not in (config.mlp_only_layers or ())
            and (layer + 1) % config.decoder_sparse_step == 0
        )

    def expert_shape(self, config: Any) -> ExpertShape:
        """Experts are narrower than the dense layers."""
        return shape_of(config, config.moe_intermediate_size)
