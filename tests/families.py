"""Tiny random models of every supported family, for tests.

Each has a valid config of its family (``save_pretrained`` and ``from_pretrained`` work), float32
weights drawn from a fixed seed and routers uneven enough that some experts are much busier than
others. Dense layers, shared experts, sliding windows and chunks are kept where a family has them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}

_SPECIFIC: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "phimoe": (
        PhimoeForCausalLM,
        PhimoeConfig,
        {
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig,
        {"intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 4},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "num_nextn_predict_layers": 0,
        },
    ),
    "granitemoeshared": (
        GraniteMoeSharedForCausalLM,
        GraniteMoeSharedConfig,
        {
            "intermediate_size": 16,
            "shared_intermediate_size": 32,
            "num_local_experts": 16,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.35,
            "logits_scaling": 2.0,
        },
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 16,
        },
    ),
}


def make_tiny(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny random model, in float32 and evaluation mode.

    Args:
        family: A key of ``FAMILIES``.
        seed: Of the weights.
        overrides: Fields of the family's config to change.
    """
    model_class, config_class, specific = _SPECIFIC[family]
    config = config_class(**{**_COMMON, **specific, **overrides})
    model = model_class(config).float().eval()
    _draw_weights(model, seed)
    return model


def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Weights that make varied text: the library's own are so small that tokens repeat."""
    generator = torch.Generator().manual_seed(seed)
    state = {**dict(model.named_parameters()), **_router_biases(model)}
    with torch.no_grad():
        for name, tensor in sorted(state.items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.ndim == 1 or name.endswith("bias") or "sinks" in name:
                tensor.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise)
            elif _is_router(name):
                # One expert's logits spread wider than the next's, so loads differ.
                spread = torch.linspace(0.2, 1.2, tensor.shape[0])[:, None]
                tensor.copy_(noise * spread / tensor.shape[-1] ** 0.5 * 2)
            else:
                tensor.copy_(1.5 * noise / model.config.hidden_size**0.5)


def _is_router(name: str) -> bool:
    return any(part in name for part in (".gate.weight", "router.weight", "router.layer.weight"))


def _router_biases(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    family: partial(make_tiny, family) for family in _SPECIFIC
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer for ``VOCABULARY`` ids: three special tokens, then bytes and pairs.

    It can encode any text, and almost any ids decode to bytes that are not whole characters.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>"]
    merges = [(a, b) for a in "aeiou" for b in "nrstldmckpg"]
    tokens = specials + alphabet + ["".join(pair) for pair in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
