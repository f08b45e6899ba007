"""What a layer chose for live tokens, to hold predictions against."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.first_layers import embedding_features
from moeless.learned.gate_predictor import Gate
from moeless.learned.judging import best_spread, judge_of, logit_error
from moeless.learned.scoring import choose
from moeless.learned.trained_predictor import LayerModel

EMBEDDING = -1
"""Stands for the embedding, the last entry, where a layer's gate input could stand."""


class LayerTruth:
    """What a layer chose for some tokens in the order of arrival, to hold predictions against.

    Args:
        tokens_TLH: Gate inputs of layers, the first one first, and perhaps embeddings.
        gate: The layer's own gate.
        ahead: The layer.
        source: The layer whose gate input it is predicted from, or the embedding.
    """

    def __init__(self, tokens_TLH: Tensor, gate: Gate, ahead: int, source: int) -> None:
        inputs_TH = tokens_TLH[:, source]
        self._inputs_TH = (
            embedding_features(inputs_TH) if source == EMBEDDING else inputs_TH.float()
        )
        self._logits_TE = gate.logits(tokens_TLH[:, ahead].float())
        self._ids_TK = choose(self._logits_TE, gate.rule, gate.correction)
        self._true_TE = one_hot(self._ids_TK, len(gate.weight))
        self._judge = judge_of(_Consecutive(len(tokens_TLH)))

    @property
    def mean_E(self) -> Tensor:
        """Mean share of each expert in a token [E]."""
        return self._true_TE.mean(dim=0)

    def score_of_mean(self, mean_E: Tensor) -> float:
        """The score of expecting the same of every token."""
        return self._judge.score(mean_E.expand_as(self._true_TE), self._true_TE)

    def score(self, model: LayerModel, spread: float) -> float:
        """Mean load accuracy over batches of several sizes."""
        return self._judge.score(self._shares(model, spread), self._true_TE)

    def error(self, model: LayerModel, spread: float) -> ErrorEstimate | None:
        """Share of misplaced tokens by size; None without a batch."""
        return self._judge.error(self._shares(model, spread), self._true_TE)

    def spread(self, model: LayerModel) -> float:
        """How sure to be of a model's logits."""
        logits_TE = model.logits(self._inputs_TH)
        scale = logit_error(logits_TE, self._logits_TE)
        return best_spread(model, logits_TE, self._ids_TK, self._judge, scale=scale)[0]

    def _shares(self, model: LayerModel, spread: float) -> Tensor:
        logits_TE = model.logits(self._inputs_TH)
        return expected_shares(logits_TE, model.rule, model.correction, spread=spread)


class _Consecutive:
    """Tokens in the order in which they came; whose they are is not known.

    Args:
        tokens: T.
    """

    def __init__(self, tokens: int) -> None:
        self.conversation: NDArray[np.int64] = np.zeros(tokens, dtype=np.int64)
        self.position: NDArray[np.int64] = np.arange(tokens)
        self.decode: NDArray[np.int64] = np.zeros(tokens, dtype=np.int64)
