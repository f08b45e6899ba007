"""Carve all layers of a dense model, and write them as a GraniteMoeShared checkpoint.

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
from moeless.engines.demo.source import EOS_TOKEN_ID
from moeless.engines.demo.streams import HiddenStream, PaddedBatch, measure_perplexity
from moeless.engines.demo.variants import DemoVariant
from moeless.errors import ModelError


def carve_model(
    dense: Any,
    variant: DemoVariant,
    batches: Sequence[PaddedBatch],
    *,
    on_layer: Callable[[int, int], None],
) -> GraniteMoeSharedForCausalLM:
    """Carve every layer; returns the model in bfloat16.

    Args:
        dense: A Llama-style causal language model in float32.
        variant: The division.
        batches: Calibration texts.
        on_layer: Told layers done and layers in all.

    Raises:
        ModelError: If the dense model is not of the expected shape.
    """
    config = dense.config
    if config.intermediate_size != variant.shared_width + variant.experts * variant.expert_width:
        raise ModelError(
            f"the dense model has {config.intermediate_size} neurons per layer; the variant "
            f"{variant.name} divides "
            f"{variant.shared_width + variant.experts * variant.expert_width}"
        )
    shape = CarveShape(
        experts=variant.experts,
        expert_width=variant.expert_width,
        top_k=variant.top_k,
        seed=variant.seed,
    )
    model = GraniteMoeSharedForCausalLM(_configure(config, variant)).to(torch.bfloat16).eval()
    source = dense.state_dict()
    target = model.state_dict()
    state = {name: tensor for name, tensor in source.items() if name in target}
    stream = HiddenStream(dense, batches)
    layers = dense.model.layers
    for i, layer in enumerate(layers):
        state.update(_carve_layer(i, layer, stream, shape))
        on_layer(i + 1, len(layers))
    absent = sorted(set(target) - set(state))
    if absent:
        raise ModelError(f"the carved model lacks {len(absent)} tensors, first {absent[0]}")
    model.load_state_dict(state)
    return model


def _carve_layer(
    index: int, layer: Any, stream: HiddenStream, shape: CarveShape
) -> dict[str, Tensor]:
    mlp = layer.mlp
    block = FeedForward(
        gate_IH=mlp.gate_proj.weight, up_IH=mlp.up_proj.weight, down_HI=mlp.down_proj.weight
    )
    before_TH = stream.attend(layer)
    x_TH = layer.post_attention_layernorm(before_TH)
    carved, answer_TH = carve_block(block, x_TH, shape, residual_TH=before_TH)
    stream.replace(before_TH + answer_TH)
    return _name_tensors(f"model.layers.{index}.", block, carved, shape.top_k)


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
    directory: Path, batches: Sequence[PaddedBatch]
) -> tuple[float, list[list[int]]]:
    """Load a written checkpoint with stock transformers; measure it in float32.

    Returns:
        The perplexity, and the tokens routed to each expert, [L][E].
    """
    model = GraniteMoeSharedForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    layers = model.model.layers
    experts = model.config.num_local_experts
    load_LE = torch.zeros(len(layers), experts, dtype=torch.long)
    running: list[PaddedBatch] = []

    def count(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            chosen = output[2][running[-1].real.flatten()]
            load_LE[layer] += torch.bincount(chosen.flatten(), minlength=experts)

        return hook

    hooks = [
        layer.block_sparse_moe.router.register_forward_hook(count(i))
        for i, layer in enumerate(layers)
    ]
    perplexity = measure_perplexity(model, batches, on_batch=running.append)
    for hook in hooks:
        hook.remove()
    return perplexity, load_LE.tolist()
