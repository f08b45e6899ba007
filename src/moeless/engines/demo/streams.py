"""Hidden states of many conversations, pushed through a dense Llama-style model layer by layer.

Carving layer by layer needs what no model's ``forward`` offers: to stop after a layer's attention,
replace the feed-forward block, and go on. Knows nothing about experts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeless.engines.demo.calibration import TokenRow

_ROWS_PER_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """Rows of similar length, padded on the right (attention is causal: it never sees padding).

    Args:
        ids: Token ids, int64 [rows, length].
        real: False where padded, bool [rows, length].
        scored: True where a token counts in a perplexity, bool [rows, length].
    """

    ids: Tensor
    real: Tensor
    scored: Tensor


def pad_rows(rows: Iterable[TokenRow]) -> list[PaddedBatch]:
    """Group rows by length and pad each group."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    batches = []
    for start in range(0, len(ordered), _ROWS_PER_BATCH):
        group = ordered[start : start + _ROWS_PER_BATCH]
        size = (len(group), max(len(row.ids) for row in group))
        ids = torch.zeros(size, dtype=torch.long)
        real, scored = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
        for i, row in enumerate(group):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            real[i, : len(row.ids)] = True
            scored[i, row.scored_from : len(row.ids)] = True
        batches.append(PaddedBatch(ids=ids, real=real, scored=scored))
    return batches


def measure_perplexity(
    model: Any,
    batches: Sequence[PaddedBatch],
    *,
    on_batch: Callable[[int, int], None] = lambda _done, _total: None,
) -> float:
    """Perplexity of the scored tokens.

    Args:
        model: A causal language model of transformers whose logits are its head's output.
        batches: The texts.
        on_batch: Told batches done and batches in all, before each and at the end.
    """
    loss, tokens = 0.0, 0
    for i, batch in enumerate(batches):
        on_batch(i, len(batches))
        scored = batch.scored[:, 1:]
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][scored])  # all positions' logits would be 800 MB
        loss += float(functional.cross_entropy(logits, batch.ids[:, 1:][scored], reduction="sum"))
        tokens += int(scored.sum())
    on_batch(len(batches), len(batches))
    return math.exp(loss / tokens)


class HiddenStream:
    """The residual stream of all rows between two layers.

    Args:
        model: A Llama-style causal language model in eval mode.
        batches: The conversations.
    """

    def __init__(self, model: Any, batches: Sequence[PaddedBatch]) -> None:
        self._real = [batch.real for batch in batches]
        self._state = [model.model.embed_tokens(batch.ids) for batch in batches]
        self._rotary = [
            model.model.rotary_emb(state, torch.arange(state.shape[1])[None])
            for state in self._state
        ]

    def attend(self, layer: Any) -> Tensor:
        """Apply a layer's attention; return the residual stream of the real tokens, [T, H]."""
        for i, (state, rotary) in enumerate(zip(self._state, self._rotary, strict=True)):
            normed = layer.input_layernorm(state)
            mixed = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
            self._state[i] = state + mixed
        return torch.cat([s[r] for s, r in zip(self._state, self._real, strict=True)])

    def replace(self, state_TH: Tensor) -> None:
        """Set the residual stream of the real tokens, in the order of :meth:`attend`."""
        parts = torch.split(state_TH, [int(real.sum()) for real in self._real])
        for state, real, part in zip(self._state, self._real, parts, strict=True):
            state[real] = part
