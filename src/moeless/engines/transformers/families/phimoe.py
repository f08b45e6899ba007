"""PhiMoE (Phi-3.5-MoE)."""

from typing import Any

from moeless.core.router import RouterRule
from moeless.engines.transformers.families.mixtral import Mixtral


class PhiMoe(Mixtral):
    """Stored like Mixtral, routed by two arg-max choices in a row."""

    name = "phimoe"
    model_types = ("phimoe",)
    model_class = "PhimoeForCausalLM"
    experts_class = "PhimoeExperts"
    router = "router"

    def router_rule(self, config: Any) -> RouterRule:
        """Sparsemixer; it chooses two experts whatever ``num_experts_per_tok`` says."""
        return RouterRule(
            kind="sparsemixer",
            path="mlp.router",
            top_k=2,
            jitter_eps=config.router_jitter_noise,
        )
