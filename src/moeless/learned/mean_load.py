"""Predicts that every token does what tokens do on average."""

import torch
from torch import Tensor

from moeless.learned.load_predictor import SharePredictor
from moeless.learned.token_rows import TokenRows


class MeanLoad(SharePredictor):
    """A constant load per layer.

    Args:
        share_LE: Mean share of a token that each expert gets, float32 [L, E].
        distance: d.
        top_k: K.
    """

    def __init__(self, share_LE: Tensor, *, distance: int, top_k: int) -> None:
        super().__init__(distance=distance, top_k=top_k)
        self._share_LE = share_LE

    @property
    def num_bytes(self) -> int:
        """Of the means."""
        return self._share_LE.numel() * self._share_LE.element_size()

    def shares(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """The same for every token, float32 [T, E]."""
        if layer + self.distance >= len(self._share_LE):
            return None
        tokens = x_TH.numel() // x_TH.shape[-1]
        return self._share_LE[layer + self.distance].expand(tokens, -1)


def average_load(rows: TokenRows, *, layers: int, experts: int, distance: int) -> MeanLoad:
    """Average over some tokens.

    Args:
        rows: The tokens.
        layers: L.
        experts: E.
        distance: d.
    """
    count_LE = torch.zeros(layers, experts)
    top_k = 1
    for chunk in rows:
        for layer, count in enumerate(count_LE):
            ids_TK = chunk.topk_ids(layer)
            top_k = ids_TK.shape[1]
            count += torch.bincount(ids_TK.reshape(-1), minlength=experts)
    return MeanLoad(count_LE / max(rows.tokens, 1), distance=distance, top_k=top_k)
