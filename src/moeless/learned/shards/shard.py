"""The tensors of one shard and what must hold for them."""

from typing import NamedTuple

import torch
from torch import Tensor

from moeless.errors import TraceError
from moeless.learned.shards.manifest import ShardManifest

_CHECK_ROWS = 256
"""Tokens whose numbers are looked at in one go: bounds the memory of the look."""


class Shard(NamedTuple):
    """Tokens of one or several conversations, each token one row.

    Args:
        gate_input: What entered the gate of every MoE layer, [T, L, H], the manifest's dtype.
        topk_ids: Experts that the model chose, int16 [T, L, K].
        conversation: Index of the prompt that a token belongs to, int32 [T].
        position: The token's position in its conversation, int32 [T].
        decode: 1 where the token was computed in a decode step, else 0, uint8 [T].
        token_ids: The token, int32 [T].
        layer_input: What entered the decoder layer, before its attention's norm, [T, L, H], the
            manifest's dtype; None where it was not recorded.
    """

    gate_input: Tensor
    topk_ids: Tensor
    conversation: Tensor
    position: Tensor
    decode: Tensor
    token_ids: Tensor
    layer_input: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.conversation)


def check_shard(shard: Shard, manifest: ShardManifest, where: str) -> None:
    """Require the shapes and dtypes that the manifest promises, experts that exist, real numbers.

    Args:
        shard: The tensors.
        manifest: Of the directory.
        where: What an error names as the place.

    Raises:
        TraceError: The first thing that does not hold, by name; of numbers that are not finite
            the layer and the token.
    """
    tokens = shard.conversation.shape[0] if shard.conversation.ndim == 1 else -1
    layers, hidden = manifest.num_layers, manifest.hidden
    floats = getattr(torch, manifest.dtype)
    expected = {
        "gate_input": ((tokens, layers, hidden), floats),
        "topk_ids": ((tokens, layers, manifest.top_k), torch.int16),
        "conversation": ((tokens,), torch.int32),
        "position": ((tokens,), torch.int32),
        "decode": ((tokens,), torch.uint8),
        "token_ids": ((tokens,), torch.int32),
        "layer_input": ((tokens, layers, hidden), floats),
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(shard, name)
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
            raise TraceError(
                f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                f"{['T' if size == -1 else size for size in shape]}"
            )
    if tokens and not 0 <= int(shard.topk_ids.min()) <= int(shard.topk_ids.max()) < (
        manifest.num_experts
    ):
        raise TraceError(
            f"{where}: topk_ids names experts {int(shard.topk_ids.min())} to "
            f"{int(shard.topk_ids.max())}, but there are {manifest.num_experts}"
        )
    _check_finite(shard, "gate_input", where)
    if shard.layer_input is not None:
        _check_finite(shard, "layer_input", where)


def _check_finite(shard: Shard, name: str, where: str) -> None:
    values: Tensor = getattr(shard, name)
    for first in range(0, len(values), _CHECK_ROWS):
        finite_TL = values[first : first + _CHECK_ROWS].isfinite().all(dim=-1)
        if not bool(finite_TL.all()):
            token, layer = (int(index) for index in (~finite_TL).nonzero()[0])
            row = first + token
            raise TraceError(
                f"{where}: {name} is not finite in layer {layer}, token {row} (position "
                f"{int(shard.position[row])} of conversation {int(shard.conversation[row])}); "
                "the model computes infinities or NaN there, try another --dtype"
            )
