"""What one layer's model is fitted to or judged by, gathered from a recording."""

from typing import NamedTuple

import torch
from torch import Tensor

from moeless.learned.gate_predictor import Gate
from moeless.learned.load_predictor import Reads
from moeless.learned.token_rows import TokenRows


class LayerTokens(NamedTuple):
    """Tokens as layer ``ahead - distance`` and layer ``ahead`` saw them.

    Args:
        inputs_TH: Hidden states to predict from, float32 [T, H].
        true_logits_TE: What the model's own gate of the layer ahead computed, float32 [T, E].
        ids_TK: Experts that the model chose there, int64 [T, K].
    """

    inputs_TH: Tensor
    true_logits_TE: Tensor
    ids_TK: Tensor


def gather(
    rows: TokenRows, gate: Gate, *, ahead: int, distance: int, reads: Reads = "gate_input"
) -> LayerTokens:
    """Read one layer's tokens into memory.

    Args:
        rows: Which tokens.
        gate: The model's own gate of the layer ahead.
        ahead: The predicted layer.
        distance: d.
        reads: Hidden states to predict from.
    """
    experts, hidden = gate.weight.shape
    inputs_TH = torch.empty(rows.tokens, hidden)
    logits_TE = torch.empty(rows.tokens, experts)
    ids_TK = torch.empty(rows.tokens, gate.rule.top_k, dtype=torch.int64)
    first = 0
    for chunk in rows:
        ids = chunk.topk_ids(ahead)
        part = slice(first, first + len(ids))
        inputs_TH[part] = chunk.states(ahead - distance, reads)
        logits_TE[part] = gate.logits(chunk.states(ahead))
        ids_TK[part] = ids
        first += len(ids)
    return LayerTokens(inputs_TH, logits_TE, ids_TK)
