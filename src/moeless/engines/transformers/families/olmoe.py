"""OLMoE (OLMoE-1B-7B)."""

from typing import Any

from moeless.core.checkpoint import ExpertLayout
from moeless.core.model import ExpertShape
from moeless.core.router import RouterRule
from moeless.engines.transformers.families.base import Family, shape_of
from moeless.engines.transformers.families.layouts import fused, per_expert


class Olmoe(Family):
    """Every layer is an MoE layer."""

    name = "olmoe"
    model_types = ("olmoe",)
    model_class = "OlmoeForCausalLM"
    experts_class = "OlmoeExperts"
    block = "mlp"
    router = "gate"

    def layer_ids(self, config: Any) -> tuple[int, ...]:
        """All layers."""
        return tuple(range(config.num_hidden_layers))

    def num_experts(self, config: Any) -> int:
        """E."""
        return int(config.num_experts)

    def expert_shape(self, config: Any) -> ExpertShape:
        """Gate, up and down of the configured sizes."""
        return shape_of(config, config.intermediate_size)

    def candidates(self, layer_prefix: str) -> tuple[ExpertLayout, ...]:
        """The original names, then what transformers holds in memory."""
        experts = f"{layer_prefix}mlp.experts"
        return (
            per_expert(experts, "gate_proj", "up_proj", "down_proj"),
            fused(f"{experts}.gate_up_proj", f"{experts}.down_proj"),
        )

    def router_rule(self, config: Any) -> RouterRule:
        """Softmax, then top-k, renormalised if the configuration says so."""
        return RouterRule(
            kind="softmax_topk",
            path="mlp.gate",
            top_k=config.num_experts_per_tok,
            normalize=bool(config.norm_topk_prob),
        )
