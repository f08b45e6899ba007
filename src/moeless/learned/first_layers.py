"""Expects the loads of the first d layers, which no gate sees ahead, from token embeddings."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeless.core.plan import LoadArray
from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.expected_shares import expected_load
from moeless.learned.gate_predictor import Gate
from moeless.learned.ridge import RidgeSums, corrected

_HALF_LIFE_TOKENS = 50_000.0
_PENALTY = 1e-2


def embedding_features(embedding_TH: Tensor) -> Tensor:
    """Embeddings of equal length, as the norms of a layer make them; float32 [T, H]."""
    embedding_TH = embedding_TH.float()
    scale_T1 = embedding_TH.pow(2).mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-6)
    return embedding_TH / scale_T1


class FirstLayers:
    """Gates of the first layers that were fitted to embeddings.

    Args:
        gates: By layer; layers that are missing are not predicted.
        spreads: How far the logits of each are taken to be off, see ``expected_shares``.
        errors: Error estimates, where known.
    """

    def __init__(
        self,
        gates: Mapping[int, Gate],
        spreads: Mapping[int, float],
        errors: Mapping[int, ErrorEstimate],
    ) -> None:
        self.gates, self.spreads, self.errors = dict(gates), dict(spreads), dict(errors)

    def predict(self, embedding_TH: Tensor) -> dict[int, LoadArray]:
        """Expected tokens per expert of each layer that is known.

        Args:
            embedding_TH: What enters the model's first layer [T, H].

        Returns:
            Layer to float64 [E].
        """
        if not self.gates:
            return {}
        with torch.inference_mode():
            features_TH = embedding_features(embedding_TH)
            found: dict[int, LoadArray] = {}
            for layer, gate in self.gates.items():
                load_E = expected_load(
                    gate.logits(features_TH),
                    gate.rule,
                    gate.correction,
                    spread=self.spreads[layer],
                )
                found[layer] = load_E.double().cpu().numpy()
            return found


class FirstLayersRidge:
    """Running sums of the first layers, in which old tokens count less and less.

    All are predicted from the same embeddings, so that they share one matrix of sums.

    Args:
        gates: The model's own of the first d layers, float32.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = list(gates)
        self._experts, hidden = gates[0].weight.shape
        self._sums = RidgeSums(hidden, self._experts * len(gates))

    def add(self, embedding_TH: Tensor, gate_input_TdH: Tensor) -> None:
        """Add tokens.

        Args:
            embedding_TH: What enters the model's first layer.
            gate_input_TdH: What enters the gates of the first d layers.
        """
        true = [
            gate.logits(gate_input_TdH[:, layer].float()) for layer, gate in enumerate(self._gates)
        ]
        self._sums.forget(0.5 ** (len(embedding_TH) / _HALF_LIFE_TOKENS))
        self._sums.add(embedding_features(embedding_TH), torch.cat(true, dim=1))

    def fit(self) -> list[Gate]:
        """Gates for embeddings, one per layer."""
        solution = self._sums.solve(_PENALTY)
        return [
            corrected(
                gate._replace(weight=torch.zeros_like(gate.weight), bias=None),
                solution[:, layer * self._experts : (layer + 1) * self._experts],
            )
            for layer, gate in enumerate(self._gates)
        ]
