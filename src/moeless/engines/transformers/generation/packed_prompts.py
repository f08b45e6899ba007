"""Several whole prompts side by side in one row: masks that keep them apart.

A short prompt's forward is bound by reading weights, so packing prompts costs little more than
one of them, and unlike padding it sends no useless token to the experts.
"""

from collections.abc import Sequence
from typing import Any

import torch

# Families whose attention was checked against prompts run alone. A model that is not listed gets
# one prompt for each forward.
_ONE_MASK = {"mixtral", "phimoe", "qwen3_moe", "olmoe", "deepseek_v3", "granitemoeshared"}
_MASK_PER_LAYER_TYPE = {"gpt_oss", "llama4_text"}
_MASKED_ATTENTION = {"sdpa", "moeless_wide", "eager"}


def can_pack(config: Any) -> bool:
    """Whether prompts may share a row of this model.

    Args:
        config: A transformers text config.
    """
    known = config.model_type in _ONE_MASK | _MASK_PER_LAYER_TYPE
    return known and config._attn_implementation in _MASKED_ATTENTION


def packed_positions(lengths: Sequence[int]) -> torch.Tensor:
    """Positions of all tokens, each prompt from 0: int64 [1, token]."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def packed_masks(
    config: Any, lengths: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """What attention takes as a finished mask.

    Args:
        config: A transformers text config for which ``can_pack`` holds.
        lengths: Tokens of each prompt.
        dtype: Of the model's activations.

    Returns:
        [1, 1, token, token], boolean for sdpa and additive for eager attention; one for each
        layer type where the family has several.
    """
    positions = packed_positions(lengths)[0]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = positions[:, None] - positions[None, :]
    full = (owner[:, None] == owner[None, :]) & (distance >= 0)
    masks = {"full_attention": full}
    if (window := getattr(config, "sliding_window", None)) is not None:
        masks["sliding_attention"] = full & (distance < window)
    if (size := getattr(config, "attention_chunk_size", None)) is not None:
        chunk = positions // size
        masks["chunked_attention"] = full & (chunk[:, None] == chunk[None, :])
    if config._attn_implementation == "eager":
        least = torch.finfo(dtype).min
        masks = {
            name: torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, least)
            for name, mask in masks.items()
        }
    finished = {name: mask[None, None] for name, mask in masks.items()}
    if config.model_type in _MASK_PER_LAYER_TYPE:
        return finished
    return finished.get("sliding_attention", finished["full_attention"])
