"""Predicts with models that were fitted to see a layer's gate d layers early."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moeless.core.plan import LoadArray
from moeless.core.router import RouterRule
from moeless.errors import ConfigError, ModelError
from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.expected_shares import expected_load, expected_shares
from moeless.learned.load_predictor import Reads, SharePredictor
from moeless.learned.narrow_gate import narrowed


class LayerModel(Protocol):
    """What predicts one layer's logits: a ``Gate``, re-fitted or as it was, or an ``Mlp``."""

    @property
    def rule(self) -> RouterRule:
        """How experts are chosen from the logits."""
        ...

    @property
    def correction(self) -> Tensor | None:
        """Added to the scores for the choice only, [E], or None."""
        ...

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        ...

    def logits(self, x_TH: Tensor) -> Tensor:
        """Router logits [T, E] of hidden states [T, H]."""
        ...


class TrainedPredictor(SharePredictor):
    """One model per layer, each asked d layers early.

    Args:
        models: L - d of them; number l is asked at layer l and predicts layer l + d. Taken as
            they are, not copied.
        distance: d.
        hidden: H.
        spreads: How far the logits of each model are taken to be off, see ``expected_shares``;
            None takes all at their word.
        errors: Error estimates by predicted layer, where known.
        reads: What the models were fitted to read.

    Raises:
        ConfigError: The distance is not positive, or spreads are not one per model.
        ModelError: There is no model.

    Cost: for gates one T x H x E product and the probabilities of T x E choices.
    """

    def __init__(
        self,
        models: Sequence[LayerModel],
        distance: int,
        *,
        hidden: int,
        spreads: Sequence[float] | None = None,
        errors: Mapping[int, ErrorEstimate] | None = None,
        reads: Reads = "gate_input",
    ) -> None:
        if distance < 1:
            raise ConfigError(f"prediction distance {distance} is not positive; use for example 1")
        if not models:
            raise ModelError("a predictor needs a model of each predicted layer, got none")
        if spreads is not None and len(spreads) != len(models):
            raise ConfigError(f"{len(spreads)} spreads for {len(models)} models; give one each")
        super().__init__(distance=distance, top_k=models[0].rule.top_k)
        self.reads = reads
        self.hidden = hidden
        self.models = list(models)
        self._asked: list[LayerModel] = [narrowed(model) for model in self.models]
        self.spreads = list(spreads) if spreads is not None else [0.0] * len(models)
        self.errors = dict(errors or {})

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.models) + self.distance

    @property
    def num_bytes(self) -> int:
        """Bytes of all models."""
        return sum(
            part.numel() * part.element_size()
            for model in self.models
            for part in model.tensors.values()
        )

    def logits(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """Expected router logits of layer ``layer + distance`` [T, E]; None if there is none."""
        if layer >= len(self.models):
            return None
        return self._asked[layer].logits(x_TH.reshape(-1, self.hidden))

    def shares(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """Expected share of each token that every expert gets, float32 [T, E]."""
        with torch.inference_mode():
            logits_TE = self.logits(layer, x_TH)
            if logits_TE is None:
                return None
            model = self.models[layer]
            return expected_shares(
                logits_TE, model.rule, model.correction, spread=self.spreads[layer]
            )

    def predict(self, layer: int, x_TH: Tensor) -> LoadArray | None:
        """Expected tokens per expert of layer ``layer + distance``, float64 [E].

        The sum of ``shares``, on a shorter way: their sum is right already, and where choices are
        taken as certain it is enough to count them.
        """
        with torch.inference_mode():
            logits_TE = self.logits(layer, x_TH)
            if logits_TE is None:
                return None
            model, spread = self.models[layer], self.spreads[layer]
            load_E = expected_load(logits_TE, model.rule, model.correction, spread=spread)
            expected: LoadArray = load_E.double().cpu().numpy()
        return expected

    def error(self, layer: int) -> ErrorEstimate | None:
        """How far off ``predict`` at this layer is expected to be; None where not measured."""
        return self.errors.get(layer + self.distance)
