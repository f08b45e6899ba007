"""Derive the recipe of a carving from a dense model, apply one, and write the checkpoint.

Layers are carved in order, each on the inputs that the layers carved before it produce, so that
its fitted projections also see what it will meet when the model runs. Knows no cache and no text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
)

from moeless.engines.demo.carve import (
    CarvedBlock,
    CarveShape,
    FeedForward,
    carve_block,
)
from moeless.engines.demo.recipe import Origin, Recipe, collect_recipe
from moeless.engines.demo.source import EOS_TOKEN_ID, DenseModel
from moeless.engines.demo.streams import HiddenStream, PaddedBatch, measure_perplexity
from moeless.engines.demo.variants import DemoVariant
from moeless.errors import ModelError

Count = Callable[[int, int], None]
"""Told how much is done, of how much."""


def derive_recipe(
    dense: DenseModel,
    origin: Origin,
    batches: Sequence[PaddedBatch],
    *,
    layers: int | None = None,
    on_layer: Count = lambda _done, _total: None,
) -> Recipe:
    """Carve layer after layer on texts, in float64 (see ``carve``).

    Args:
        dense: The dense model.
        origin: What is derived from what.
        batches: Calibration texts.
        layers: Only so many, from the first; None for all.
        on_layer: Told of progress.

    Raises:
        ModelError: If the dense model is not of the expected shape.
    """
    variant = origin.variant
    _check_width(dense, variant)
    shape = CarveShape(
        experts=variant.experts,
        expert_width=variant.expert_width,
        top_k=variant.top_k,
        seed=variant.seed,
    )
    with torch.inference_mode():
        model = dense.instantiate().double()
        stream = HiddenStream(model, batches)
        carved = []
        chosen = model.model.layers[:layers]
        for layer in chosen:
            carved.append(_carve_layer(layer, stream, shape))
            on_layer(len(carved), len(chosen))
    return collect_recipe(origin, carved)


def _carve_layer(layer: Any, stream: HiddenStream, shape: CarveShape) -> CarvedBlock:
    mlp = layer.mlp
    block = FeedForward(
        gate_IH=mlp.gate_proj.weight, up_IH=mlp.up_proj.weight, down_HI=mlp.down_proj.weight
    )
    before_TH = stream.attend(layer)
    x_TH = layer.post_attention_layernorm(before_TH)
    carved, answer_TH = carve_block(block, x_TH, shape, residual_TH=before_TH)
    stream.replace(before_TH + answer_TH)
    return carved


def _check_width(dense: DenseModel, variant: DemoVariant) -> None:
    divided = variant.shared_width + variant.experts * variant.expert_width
    if dense.config.intermediate_size != divided:
        raise ModelError(
            f"the dense model has {dense.config.intermediate_size} neurons per layer; the variant "
            f"{variant.name} divides {divided}"
        )


def apply_recipe(
    dense: DenseModel,
    recipe: Recipe,
    *,
    on_layer: Count = lambda _done, _total: None,
) -> GraniteMoeSharedForCausalLM:
    """The carved model in bfloat16: the same bits on every machine.

    Raises:
        ModelError: If the recipe does not fit the dense model.
    """
    variant = recipe.origin.variant
    _check_width(dense, variant)
    total = dense.config.num_hidden_layers
    if recipe.layers != total:
        raise ModelError(f"the recipe carves {recipe.layers} layers, the model has {total}")
    with torch.device("meta"):  # no memory, no random weights
        model = GraniteMoeSharedForCausalLM(_configure(dense.config, variant))
    model = model.to(torch.bfloat16).eval()
    target = model.state_dict()
    state = {name: tensor for name, tensor in dense.state.items() if name in target}
    for i in range(total):
        prefix = f"model.layers.{i}."
        mlp = {
            name: dense.state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        }
        block = FeedForward(gate_IH=mlp["gate"], up_IH=mlp["up"], down_HI=mlp["down"])
        carved = recipe.block(i, block.down_HI)
        state.update(_name_tensors(prefix, block, carved, variant.top_k))
        on_layer(i + 1, total)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    absent = sorted(set(target) - set(state))
    if absent:
        raise ModelError(f"the carved model lacks {len(absent)} tensors, first {absent[0]}")
    model.load_state_dict(
        {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, assign=True
    )
    model.tie_weights()
    return model


def _name_tensors(
    prefix: str, block: FeedForward, carved: CarvedBlock, top_k: int
) -> dict[str, Tensor]:
    """Tensors of a layer under the checkpoint's names; the factor K undoes the weights 1 / K."""
    gate, up, down = block.gate_IH, block.up_IH, carved.down_HI
    shared, groups = carved.shared, carved.groups_EW
    return {
        f"{prefix}block_sparse_moe.router.weight": carved.router_EH,
        f"{prefix}block_sparse_moe.experts.gate_up_proj": torch.cat([gate[groups], up[groups]], 1),
        f"{prefix}block_sparse_moe.experts.down_proj": torch.stack(
            [down[:, group] * top_k for group in groups]
        ),
        f"{prefix}shared_mlp.input_linear.weight": torch.cat([gate[shared], up[shared]]),
        f"{prefix}shared_mlp.output_linear.weight": down[:, shared],
    }


def _configure(dense: Any, variant: DemoVariant) -> GraniteMoeSharedConfig:
    head_size = dense.hidden_size // dense.num_attention_heads
    return GraniteMoeSharedConfig(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        intermediate_size=variant.expert_width,
        shared_intermediate_size=variant.shared_width,
        num_local_experts=variant.experts,
        num_experts_per_tok=variant.top_k,
        max_position_embeddings=dense.max_position_embeddings,
        rms_norm_eps=dense.rms_norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": dense.rope_parameters["rope_theta"],
        },
        tie_word_embeddings=True,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=head_size**-0.5,
        bos_token_id=dense.bos_token_id,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
    )


def save_model(model: GraniteMoeSharedForCausalLM, tokenizer: Any, directory: Path) -> None:
    """Write weights, tokenizer, chat template and generation defaults."""
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
        do_sample=False,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def measure_carved(
    directory: Path,
    batches: Sequence[PaddedBatch],
    *,
    on_batch: Count = lambda _done, _total: None,
) -> tuple[float, list[list[int]]]:
    """Load a written checkpoint with stock transformers; measure it in float32.

    Args:
        directory: The checkpoint.
        batches: The texts.
        on_batch: Told batches done and batches in all.

    Returns:
        The perplexity, and the tokens routed to each expert, [L][E].
    """
    model = GraniteMoeSharedForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    layers = model.model.layers
    experts = model.config.num_local_experts
    load_LE = torch.zeros(len(layers), experts, dtype=torch.long)
    running = batches[0]

    def note(done: int, total: int) -> None:
        nonlocal running
        running = batches[min(done, total - 1)]
        on_batch(done, total)

    def count(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            chosen = output[2][running.real.flatten()]
            load_LE[layer] += torch.bincount(chosen.flatten(), minlength=experts)

        return hook

    for i, layer in enumerate(layers):
        layer.block_sparse_moe.router.register_forward_hook(count(i))
    return measure_perplexity(model, batches, on_batch=note), load_LE.tolist()
