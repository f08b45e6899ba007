"""Shapes of MoE layers that fit a small machine, as random checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from moeless.engines.transformers.loader import LoadedModel, load_engine_model

LAYERS: Final = 2
DTYPE: Final = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Experts of a layer, and how many of them a token uses.

    Args:
        name: For reports.
        hidden: H.
        intermediate: I of an expert.
        experts: E.
        top_k: K.
        shared: Whether the model has shared experts, as the demo model does.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.hidden} x {self.intermediate}, {self.experts} experts, "
            f"top-{self.top_k}"
        )


MIXTRAL: Final = LayerShape(name="mixtral", hidden=1024, intermediate=1792, experts=8, top_k=2)
"""Mixtral's experts and top-k, narrower: its own experts would take seconds a layer here."""

DEMO: Final = LayerShape(
    name="demo16", hidden=576, intermediate=48, experts=16, top_k=8, shared=True
)
"""As the demo model."""


def save_random(shape: LayerShape, directory: Path, *, seed: int) -> LoadedModel:
    """Write a checkpoint of so many layers with random weights, and load it without experts.

    Args:
        shape: Of every layer.
        directory: Where to.
        seed: Of the weights.
    """
    from transformers import AutoModelForCausalLM, GraniteMoeSharedConfig, MixtralConfig

    heads = shape.hidden // 64
    numbers: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": True,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
    }
    if shape.shared:
        config = GraniteMoeSharedConfig(**numbers, shared_intermediate_size=shape.hidden)
    else:
        config = MixtralConfig(**numbers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPE))
    model.save_pretrained(directory)
    return load_engine_model(directory)
