"""DeepSeek-V3 and DeepSeek-R1, block FP8 included."""

from typing import Any

from moeless.core.model import ExpertShape
from moeless.core.router import RouterRule
from moeless.engines.transformers.families.base import shape_of
from moeless.engines.transformers.families.olmoe import Olmoe


class DeepseekV3(Olmoe):
    """Stored like OLMoE; the first layers are dense, shared experts stay in the engine."""

    name = "deepseek_v3"
    model_types = ("deepseek_v3",)
    model_class = "DeepseekV3ForCausalLM"
    experts_class = "DeepseekV3Experts"

    def layer_ids(self, config: Any) -> tuple[int, ...]:
        """All but the first ``first_k_dense_replace`` layers."""
        return tuple(range(config.first_k_dense_replace, config.num_hidden_layers))

    def num_experts(self, config: Any) -> int:
        """E, without the shared experts."""
        return int(config.n_routed_experts)

    def expert_shape(self, config: Any) -> ExpertShape:
        """Experts are narrower than the dense layers."""
        return shape_of(config, config.moe_intermediate_size)

    def router_rule(self, config: Any) -> RouterRule:
        """Sigmoid scores, group-limited top-k with a correction bias, scaled."""
        return RouterRule(
            kind="sigmoid_group",
            path="mlp.gate",
            top_k=config.num_experts_per_tok,
            normalize=bool(config.norm_topk_prob),
            correction_bias="e_score_correction_bias",
            num_groups=config.n_group,
            top_groups=config.topk_group,
            scale=float(config.routed_scaling_factor),
            float32_logits=True,
        )
