"""Predicts from which experts were chosen: a table from layer to layer, without hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moeless.learned.gate_predictor import Gate
from moeless.learned.load_predictor import SharePredictor
from moeless.learned.scoring import choose
from moeless.learned.token_rows import TokenRows


class TransitionTable(SharePredictor):
    """How often tokens that chose one expert choose another d layers on.

    Args:
        gates: The model's own; the gate of the asked layer says what a token chooses there.
        tables: For each asked layer, float32 [E, E]: the share of a token that expert j of the
            layer ahead gets, given that expert i was chosen; rows sum to K.
        distance: d.
    """

    def __init__(self, gates: Sequence[Gate], tables: Sequence[Tensor], distance: int) -> None:
        super().__init__(distance=distance, top_k=gates[0].rule.top_k)
        self._gates, self._tables = list(gates), list(tables)

    @property
    def num_bytes(self) -> int:
        """Of the tables."""
        return sum(table.numel() * table.element_size() for table in self._tables)

    def shares(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """Mean row of the experts that each token chooses, float32 [T, E]."""
        if layer >= len(self._tables):
            return None
        gate = self._gates[layer]
        logits_TE = gate.logits(x_TH.reshape(-1, gate.weight.shape[1]))
        return self._tables[layer][choose(logits_TE, gate.rule, gate.correction)].mean(dim=1)


def count_transitions(gates: Sequence[Gate], rows: TokenRows, distance: int) -> TransitionTable:
    """Count the transitions of some tokens.

    Args:
        gates: The model's own.
        rows: The tokens.
        distance: d.

    Returns:
        The table; experts that no token chose get the mean row of their layer.
    """
    experts, top_k = gates[0].weight.shape[0], gates[0].rule.top_k
    count_LEE = torch.zeros(len(gates) - distance, experts * experts)
    for chunk in rows:
        for layer, count in enumerate(count_LEE):
            here, ahead = chunk.topk_ids(layer), chunk.topk_ids(layer + distance)
            pair = here[:, :, None] * experts + ahead[:, None, :]
            count += torch.bincount(pair.reshape(-1), minlength=experts * experts)
    tables = []
    for count in count_LEE.reshape(-1, experts, experts):
        total = count.sum(dim=1, keepdim=True)
        mean = count.sum(dim=0, keepdim=True) / count.sum().clamp(min=1.0)
        tables.append(top_k * torch.where(total > 0, count / total.clamp(min=1.0), mean))
    return TransitionTable(gates, tables, distance)
