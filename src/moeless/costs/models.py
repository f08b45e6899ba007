"""Shapes of well-known Mixture-of-Experts models, for traces that come without a checkpoint.

Numbers are those of the published configurations. Experts are counted in bfloat16, whatever
packing a checkpoint uses. This module must not know how a checkpoint is read.
"""

import re
from dataclasses import dataclass
from typing import Final

from moeless.core.model import ExpertShape


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The routed experts of a model, without names or files.

    Args:
        name: Canonical short name.
        num_layers: L, MoE layers.
        num_experts: E, logical experts per layer.
        top_k: K, experts per token.
        expert: The shape of every routed expert.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    expert: ExpertShape

    @property
    def layer_bytes(self) -> int:
        """Bytes of one copy of each expert of a layer."""
        return self.num_experts * self.expert.num_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one copy of each expert of all layers."""
        return self.num_layers * self.layer_bytes


def _model(name: str, layers: int, experts: int, top_k: int, expert: ExpertShape) -> ModelShape:
    return ModelShape(
        name=name, num_layers=layers, num_experts=experts, top_k=top_k, expert=expert
    )


_GPT_OSS = ExpertShape(hidden=2880, intermediate=2880, activation="swiglu_clamped", bias=True)
_DEEPSEEK_V3 = ExpertShape(hidden=7168, intermediate=2048)

KNOWN_MODELS: Final = (
    _model("mixtral-8x7b", 32, 8, 2, ExpertShape(hidden=4096, intermediate=14336)),
    _model("mixtral-8x22b", 56, 8, 2, ExpertShape(hidden=6144, intermediate=16384)),
    _model("phi-3.5-moe", 32, 16, 2, ExpertShape(hidden=4096, intermediate=6400)),
    _model(
        "llama-4-scout",
        48,
        16,
        1,
        ExpertShape(hidden=5120, intermediate=8192, score_on="input"),
    ),
    _model("qwen3-30b-a3b", 48, 128, 8, ExpertShape(hidden=2048, intermediate=768)),
    _model("olmoe-1b-7b", 16, 64, 8, ExpertShape(hidden=2048, intermediate=1024)),
    _model("gpt-oss-20b", 24, 32, 4, _GPT_OSS),
    _model("gpt-oss-120b", 36, 128, 4, _GPT_OSS),
    _model("deepseek-v3", 58, 256, 8, _DEEPSEEK_V3),
    _model("deepseek-r1", 58, 256, 8, _DEEPSEEK_V3),
)
"""Routed experts only: shared experts and dense layers belong to the engine."""

_ALIASES: Final = {"olmoe": "olmoe-1b-7b", "demo": "smollm2-135m-e16-k8-s896"}
_DEMO_LAYERS: Final = 30
_DEMO_HIDDEN: Final = 576
_DEMO_INTERMEDIATE: Final = 1536
_DEMO = re.compile(r"smollm2-135m-e(\d{1,4})-k(\d{1,4})-s(\d{1,4})(?:-seed\d+)?")


def known_model(name: str) -> ModelShape | None:
    """Find a model by its hub id, directory or short name.

    The last part of the name decides, whatever its case: ``mistralai/Mixtral-8x7B-Instruct-v0.1``
    is Mixtral 8x7B. Fine-tuned and quantised variants have the shape of their base; distilled
    ones do not.

    Args:
        name: For example ``Qwen/Qwen3-30B-A3B-Instruct-2507`` or ``smollm2-135m-e16-k8-s896``.

    Returns:
        The shape, or None for a model that is not known.
    """
    last = re.split(r"[/\\]|--", name.strip().rstrip("/\\").lower())[-1]
    last = _ALIASES.get(last, last)
    if demo := _DEMO.fullmatch(last):
        return _demo_model(last, *(int(group) for group in demo.groups()))
    if "distill" in last:
        return None
    for model in KNOWN_MODELS:
        if re.match(rf"{re.escape(model.name)}(?![a-z0-9])", last):
            return model
    return None


def _demo_model(name: str, experts: int, top_k: int, shared: int) -> ModelShape | None:
    """The demo model, carved from SmolLM2-135M; None if such a division cannot exist."""
    width, rest = divmod(_DEMO_INTERMEDIATE - shared, max(experts, 1))
    if rest or width < 1 or not 1 <= top_k <= experts:
        return None
    expert = ExpertShape(hidden=_DEMO_HIDDEN, intermediate=width)
    return _model(name, _DEMO_LAYERS, experts, top_k, expert)
