"""What a model does differently in decode steps: one new token per sequence.

*Attention* goes over exactly the columns that a sequence sees. A batch's keys and values are
right-aligned (``generation.batch_cache``), so that is a run of columns: no mask is built, and no
column is computed that is masked. Prompts keep the attention that the model was loaded with; where
torch would emulate bfloat16, they are attended to in float32.

*Batch invariance*: with products in panels, norms by rows and this attention, a sequence's result
depends on the others only where torch computes all rows in one go: in routers and in the cosines
of positions. Asked for, these run row by row; then a sequence's numbers are the same to the bit
whatever runs beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from moeless.core.processor import this_processor
from moeless.errors import ConfigError
from moeless.functions.compute.panels import can_lay_out
from moeless.functions.compute.rows import DecodeAttention

_NAME, _WIDE_NAME = "moeless_decode", "moeless_wide"
# Families whose layers see all, or the last tokens alike; and those where it depends on the layer.
_ONE_KIND = {"mixtral", "phimoe", "qwen3_moe", "olmoe", "deepseek_v3", "granitemoeshared"}
_KIND_PER_LAYER = {"gpt_oss", "llama4_text"}

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")

_Columns = NDArray[np.int64]


class DecodeSteps:
    """Puts the attention of decode steps in place while they run.

    Args:
        model: A loaded model; its attention layers are told where to look.

    ``is_used`` says whether the model's family, dtype and device are known here; where they are
    not ``attending`` changes nothing.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config()
        self._runs = False
        kinds = _ONE_KIND | _KIND_PER_LAYER
        dtype = str(model.dtype).removeprefix("torch.")
        layers = [layer for layer in model.modules() if hasattr(layer, "layer_idx")]
        self.is_used = (
            self._config.model_type in kinds
            and model.device.type == "cpu"
            and can_lay_out(dtype)
            and self._config._attn_implementation in ("sdpa", "eager", _WIDE_NAME)
        )
        if not self.is_used:
            return
        AttentionInterface.register(_NAME, _attend)
        emulated = dtype not in this_processor().fast_dtypes
        if emulated and self._config._attn_implementation == "sdpa":
            AttentionInterface.register(_WIDE_NAME, _attend_wide)
            AttentionMaskInterface.register(_WIDE_NAME, sdpa_mask)
            self._config._attn_implementation = _WIDE_NAME
        self._attention = DecodeAttention()
        self._length_B: _Columns = np.zeros(0, dtype=np.int64)
        self._spans: dict[tuple[str, int], tuple[_Columns, _Columns]] = {}
        for layer in layers:
            vars(layer)["moeless_steps"] = self

    def make_invariant(self, model: Any) -> None:
        """From now on rows do not depend on each other in decode steps.

        Args:
            model: The model that this was made for.

        Raises:
            ConfigError: Its family, dtype or device is not known here, or it has dense layers
                whose rows torch computes together.
        """
        left = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        if not self.is_used or left:
            where = f"layer {left[0]}" if left else f"{self._config.model_type} on {model.device}"
            raise ConfigError(
                f"batch invariance is for known families on a CPU in float32 or bfloat16, with "
                f"compiled loops; not for {where}"
            )
        experts = {getattr(self._config, name, None) for name in _EXPERT_COUNTS} - {None}
        for module in model.modules():
            weight = vars(module).get("_parameters", {}).get("weight")
            routes = weight is not None and weight.dim() == 2 and len(weight) in experts
            if routes or type(module).__name__.endswith("RotaryEmbedding"):
                module.forward = self._by_row(module.forward)

    def _by_row(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*tensors: Any, **named: Any) -> Any:
            given = (*tensors, *named.values())
            if not self._runs or len(given[0]) == 1:
                return forward(*tensors, **named)
            rows = [
                forward(
                    *(tensor[row : row + 1] for tensor in tensors),
                    **{name: _row_of(value, row) for name, value in named.items()},
                )
                for row in range(len(given[0]))
            ]
            if isinstance(rows[0], torch.Tensor):
                return torch.cat(rows)
            return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

        return run

    @contextmanager
    def attending(self, lengths: Sequence[int]) -> Iterator[bool]:
        """A decode step of sequences of some lengths, the new token not counted.

        Yields:
            Whether no mask is needed.
        """
        if not self.is_used:
            yield False
            return
        config = self._config
        before = config._attn_implementation
        self._length_B = np.array(lengths, dtype=np.int64)
        self._spans = {}
        config._attn_implementation = _NAME
        self._runs = True
        try:
            yield True
        finally:
            self._runs = False
            config._attn_implementation = before

    def attend(self, layer: Any, query: torch.Tensor, keys: torch.Tensor, **rest: Any) -> Any:
        """One layer's attention; see ``functions.compute.rows.DecodeAttention``."""
        begin_B, end_B = self._span(layer.layer_idx, keys.shape[2])
        return self._attention(query, keys, begin_B=begin_B, end_B=end_B, **rest)

    def _span(self, layer: int, columns: int) -> tuple[_Columns, _Columns]:
        kind, size = self._limit(layer)
        span = self._spans.get((kind, size))
        if span is None:
            end_B = np.full(len(self._length_B), columns, dtype=np.int64)
            seen_B = self._length_B + 1
            if kind == "sliding_attention":
                seen_B = np.minimum(seen_B, size)
            elif kind == "chunked_attention":
                seen_B = self._length_B % size + 1
            span = self._spans[kind, size] = end_B - seen_B, end_B
        return span

    def _limit(self, layer: int) -> tuple[str, int]:
        """How a layer limits what is seen, and to how many tokens."""
        config = self._config
        window = getattr(config, "sliding_window", None)
        if config.model_type in _ONE_KIND:
            return ("sliding_attention", window) if window is not None else ("full_attention", 0)
        kind = config.layer_types[layer]
        sizes = {"sliding_attention": window, "chunked_attention": None}
        if kind == "chunked_attention":
            sizes[kind] = config.attention_chunk_size
        return kind, sizes.get(kind) or 0


def _row_of(value: Any, row: int) -> Any:
    return value[row : row + 1] if isinstance(value, torch.Tensor) and value.dim() else value


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - none is built
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it."""
    steps: DecodeSteps = vars(module)["moeless_steps"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.detach().float()
    output = steps.attend(module, query.to(key.dtype), key, values=value, scale=scale, sinks=sinks)
    return output, None


def _attend_wide(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it: in float32, whatever the model's dtype."""
    wide = (states.float() for states in (query, key, value))
    output, _ = sdpa_attention_forward(module, *wide, attention_mask, **kwargs)
    return output.to(query.dtype), None
