"""GPT-OSS (gpt-oss-20b, gpt-oss-120b), in MXFP4 as published or in plain floats."""

from typing import Any

from moeless.core.checkpoint import Codec, ExpertLayout, TensorSource
from moeless.core.model import ExpertShape
from moeless.core.router import RouterRule
from moeless.engines.transformers.families.base import Family, shape_of


class GptOss(Family):
    """Biases everywhere; gate and up alternate and are clamped."""

    name = "gpt_oss"
    model_types = ("gpt_oss",)
    model_class = "GptOssForCausalLM"
    experts_class = "GptOssExperts"
    block = "mlp"
    router = "router"

    def layer_ids(self, config: Any) -> tuple[int, ...]:
        """All layers."""
        return tuple(range(config.num_hidden_layers))

    def num_experts(self, config: Any) -> int:
        """E."""
        return int(config.num_local_experts)

    def expert_shape(self, config: Any) -> ExpertShape:
        """Clamped SwiGLU with the configured slope and bound."""
        return shape_of(
            config,
            config.intermediate_size,
            activation="swiglu_clamped",
            bias=True,
            alpha=float(config.swiglu_alpha),
            limit=float(config.swiglu_limit),
        )

    def candidates(self, layer_prefix: str) -> tuple[ExpertLayout, ...]:
        """MXFP4 keeps [out, in]; plain floats are stored [in, out]."""
        return (_layout(layer_prefix, "mxfp4"), _layout(layer_prefix, "plain"))

    def router_rule(self, config: Any) -> RouterRule:
        """Top-k of the logits, softmax over those."""
        return RouterRule(
            kind="topk_softmax",
            path="mlp.router",
            top_k=config.num_experts_per_tok,
            has_bias=True,
        )


def _layout(layer_prefix: str, codec: Codec) -> ExpertLayout:
    stem = f"{layer_prefix}mlp.experts."
    transposed = codec == "plain"
    return ExpertLayout(
        gate_up=TensorSource(
            keys=(f"{stem}gate_up_proj",),
            fused=True,
            transposed=transposed,
            interleaved=True,
            codec=codec,
        ),
        down=TensorSource(
            keys=(f"{stem}down_proj",), fused=True, transposed=transposed, codec=codec
        ),
        gate_up_bias=TensorSource(
            keys=(f"{stem}gate_up_proj_bias",), fused=True, interleaved=True
        ),
        down_bias=TensorSource(keys=(f"{stem}down_proj_bias",), fused=True),
    )
