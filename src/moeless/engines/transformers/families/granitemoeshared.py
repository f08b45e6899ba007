"""GraniteMoeShared (Granite 3 MoE with shared experts)."""

import re
from typing import Any

from moeless.core.checkpoint import ExpertLayout
from moeless.core.model import ExpertShape
from moeless.core.router import RouterRule
from moeless.engines.transformers.families.base import Family, shape_of
from moeless.engines.transformers.families.layouts import fused


class GraniteMoeShared(Family):
    """Every layer is an MoE layer; the shared expert is outside the block."""

    name = "granitemoeshared"
    model_types = ("granitemoeshared",)
    model_class = "GraniteMoeSharedForCausalLM"
    experts_class = "GraniteMoeSharedExperts"
    block = "block_sparse_moe"
    router = "router"
    expert_keys = re.compile(r"\.block_sparse_moe\.(input_linear|output_linear|experts)\.")

    def layer_ids(self, config: Any) -> tuple[int, ...]:
        """All layers."""
        return tuple(range(config.num_hidden_layers))

    def num_experts(self, config: Any) -> int:
        """E."""
        return int(config.num_local_experts)

    def expert_shape(self, config: Any) -> ExpertShape:
        """Gate, up and down of the configured sizes."""
        return shape_of(config, config.intermediate_size)

    def candidates(self, layer_prefix: str) -> tuple[ExpertLayout, ...]:
        """The original names, then what transformers holds in memory."""
        stem = f"{layer_prefix}block_sparse_moe."
        return (
            fused(f"{stem}input_linear.weight", f"{stem}output_linear.weight"),
            fused(f"{stem}experts.gate_up_proj", f"{stem}experts.down_proj"),
        )

    def router_rule(self, config: Any) -> RouterRule:
        """Top-k of the logits, softmax over those."""
        return RouterRule(
            kind="topk_softmax",
            path="block_sparse_moe.router",
            top_k=config.num_experts_per_tok,
        )
