"""Llama 4 (Scout, Maverick): the text model, alone or inside the multimodal wrapper."""

from typing import Any

from moeless.core.checkpoint import ExpertLayout, TensorSource
from moeless.core.model import ExpertShape
from moeless.core.router import RouterRule
from moeless.engines.transformers.families.base import Family, shape_of


class Llama4(Family):
    """Scores weigh the experts' inputs; a shared expert sits in the same block.

    Of the multimodal model only the text model is served.
    """

    name = "llama4"
    model_types = ("llama4", "llama4_text")
    model_class = "Llama4ForCausalLM"
    # Its block computes every expert for every token, so the whole block is replaced.
    experts_class = "Llama4TextMoe"
    block = "feed_forward"
    router = "router"

    def text_config(self, config: Any) -> Any:
        """The part of the multimodal configuration that describes the text model."""
        return config.text_config if config.model_type == "llama4" else config

    def key_prefix(self, config: Any) -> str:
        """The multimodal wrapper puts the text model under a name of its own."""
        return "language_model." if config.model_type == "llama4" else ""

    def layer_ids(self, config: Any) -> tuple[int, ...]:
        """The configured MoE layers; others are dense."""
        return tuple(sorted(self.text_config(config).moe_layers))

    def num_experts(self, config: Any) -> int:
        """E, without the shared expert."""
        return int(self.text_config(config).num_local_experts)

    def expert_shape(self, config: Any) -> ExpertShape:
        """Gate, up and down on an input that the score has scaled."""
        text = self.text_config(config)
        return shape_of(text, text.intermediate_size, score_on="input")

    def candidates(self, layer_prefix: str) -> tuple[ExpertLayout, ...]:
        """All experts of a layer in two tensors, [E, H, 2I] and [E, I, H]."""
        experts = f"{layer_prefix}feed_forward.experts."
        return (
            ExpertLayout(
                gate_up=TensorSource(
                    keys=(f"{experts}gate_up_proj",), fused=True, transposed=True
                ),
                down=TensorSource(keys=(f"{experts}down_proj",), fused=True, transposed=True),
            ),
        )

    def router_rule(self, config: Any) -> RouterRule:
        """Top-k of the logits, sigmoid of each."""
        return RouterRule(
            kind="topk_sigmoid",
            path="feed_forward.router",
            top_k=self.text_config(config).num_experts_per_tok,
        )
