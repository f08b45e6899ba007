"""Query scaling by position for attention that scales by cache length.

Llama 4 multiplies the queries of its layers without rotary embedding by a factor that grows with
the position, and takes the position from the length of the cache. In a batch of rows of different
length that is the longest row's position for all of them.
"""

from typing import Any

import torch
from torch import nn


def scale_by_position(model: nn.Module, max_model_len: int) -> int:
    """Make such layers take each row's own position.

    Results for a single row are unchanged. Nothing is done where no factor can differ from 1.

    Args:
        model: A loaded model; changed in place through module hooks.
        max_model_len: Longest sequence served.

    Returns:
        How many layers were changed.
    """
    changed = 0
    for layer in list(model.modules()):
        attention: Any = getattr(layer, "self_attn", None)
        if not getattr(attention, "attn_temperature_tuning", False):
            continue
        if attention.use_rope or max_model_len < attention.floor_scale:
            continue
        attention.attn_temperature_tuning = False
        scale = _QueryScale(attention.floor_scale, attention.attn_scale)
        layer.register_forward_pre_hook(scale.note_positions, with_kwargs=True)
        attention.q_proj.register_forward_hook(scale.apply)
        changed += 1
    return changed


class _QueryScale:
    """The hooks of one layer: the layer knows the positions, its projection makes the queries."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        self._floor_scale = floor_scale
        self._attn_scale = attn_scale
        self._positions: torch.Tensor | None = None

    def note_positions(
        self, _layer: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._positions = kwargs["position_ids"]

    def apply(
        self, _projection: nn.Module, _args: tuple[Any, ...], queries: torch.Tensor
    ) -> torch.Tensor:
        assert self._positions is not None
        positions = self._positions.to(queries.device).float()
        steps = torch.floor((positions + 1.0) / self._floor_scale)
        scales = torch.log1p(steps) * self._attn_scale + 1.0
        return (queries * scales[..., None]).to(queries.dtype)
