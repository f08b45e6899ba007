"""Learns from live gate inputs, and says when what it learnt is better than what is in use.

Must not know threads, clocks or engines: it is given tokens, and answers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moeless.errors import ConfigError
from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.first_layers import FirstLayers
from moeless.learned.first_layers_learning import FirstLayersFit
from moeless.learned.gate_predictor import Gate
from moeless.learned.layer_truth import LayerTruth
from moeless.learned.live_options import LiveOptions, next_fit
from moeless.learned.newest_tokens import NewestTokens
from moeless.learned.online_ridge import OnlineRidge, in_float32
from moeless.learned.trained_predictor import LayerModel, TrainedPredictor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Swap:
    """A predictor that is better than the one before.

    Args:
        predictor: The new one.
        layers: Layers in which it differs.
        fitted_tokens: Tokens that it was fitted to; old ones count less than one each.
        judged_tokens: Newer tokens that both were judged by.
        accuracy_before: Mean load accuracy of the old one on those, over all layers.
        accuracy_after: The same of the new one.
    """

    predictor: TrainedPredictor
    layers: int
    fitted_tokens: int
    judged_tokens: int
    accuracy_before: float
    accuracy_after: float


class LiveLearning:
    """Re-fits gates to live tokens, and holds the results against the predictor in use.

    Args:
        gates: The model's own, in order.
        distance: d.
        options: How.
        pause: Called between pieces of work.

    Raises:
        ConfigError: The model has too few layers for the distance.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        distance: int,
        options: LiveOptions | None = None,
        *,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        if not 1 <= distance < len(gates):
            raise ConfigError(f"distance {distance}: use 1 to {len(gates) - 1}")
        self._gates = [in_float32(gate) for gate in gates]
        self._options = options = options or LiveOptions()
        self._distance, self._pause = distance, pause
        self.predictor = TrainedPredictor(
            self._gates[distance:], distance, hidden=gates[0].weight.shape[1]
        )
        """In use; copied gates at first. Replaced, never changed but for its error estimates."""
        self._first: FirstLayersFit | None = None
        self._newest = NewestTokens(self.held_out_tokens, options.chunk_tokens)
        self._ridge: OnlineRidge | None = None
        self._fit_at_tokens = options.first_fit_tokens
        self._fitted_tokens = 0

    @property
    def first_layers(self) -> FirstLayers:
        """Of the first d layers, as far as they beat the mean load; needs embeddings."""
        return FirstLayers({}, {}, {}) if self._first is None else self._first.used

    @property
    def skipped_tokens(self) -> int:
        """Tokens left out because they were not finite."""
        return self._newest.skipped_tokens

    @property
    def held_out_tokens(self) -> int:
        """Tokens that are kept to judge by; fewer than asked for where memory is short."""
        layers, hidden = len(self._gates), self._gates[0].weight.shape[1]
        affordable = self._options.max_held_out_bytes // (layers * hidden * 4)
        return max(2, min(self._options.held_out_tokens, affordable))

    def learn(self, gate_input_TLH: Tensor) -> Swap | None:
        """Take live tokens, the newest last.

        Args:
            gate_input_TLH: What entered every layer's gate [T, L, H]; kept. With one entry more,
                the last is the token's embedding, from which the first d layers are learnt.

        Returns:
            A better predictor, if this led to one; it is in use from now on.
        """
        for chunk_TLH in self._newest.push(gate_input_TLH):
            self._add(chunk_TLH)
        if self._ridge is None or self._fitted_tokens < self._fit_at_tokens:
            return None
        self._fit_at_tokens = next_fit(self._fitted_tokens, self._options)
        return self._compare(self._ridge)

    def _add(self, tokens_TLH: Tensor) -> None:
        if self._ridge is None:
            self._ridge = OnlineRidge(
                self._gates, self._distance, layers=self._choose_layers(), pause=self._pause
            )
        self._ridge.add(tokens_TLH)
        self._fitted_tokens += len(tokens_TLH)
        if tokens_TLH.shape[1] > len(self._gates):
            if self._first is None:
                self._first = FirstLayersFit(self._gates[: self._distance], self._pause)
            self._first.add(tokens_TLH)

    def _choose_layers(self) -> list[int]:
        """Layers to fit: all that memory is enough for, the least accurate first."""
        ahead = list(range(self._distance, len(self._gates)))
        experts, hidden = self._gates[0].weight.shape
        sums_bytes = 8 * (hidden + 1) * (hidden + 1 + experts)
        affordable = max(1, self._options.max_sums_bytes // sums_bytes)
        if affordable >= len(ahead):
            return ahead
        tokens = self._newest.all_TLH
        accuracy = {}
        for layer in ahead:
            truth = LayerTruth(tokens, self._gates[layer], layer, layer - self._distance)
            accuracy[layer] = truth.score(self.predictor.models[layer - self._distance], 0.0)
            self._pause()
        _log.warning(
            "learning from live traffic: %d of %d layers fit into %d MiB; those with the least "
            "accurate gates are learnt",
            affordable,
            len(ahead),
            self._options.max_sums_bytes >> 20,
        )
        return sorted(ahead, key=lambda layer: accuracy[layer])[:affordable]

    def _compare(self, ridge: OnlineRidge) -> Swap | None:
        fitted, old = ridge.fit(), self.predictor
        deciding_TLH, judged_TLH = self._newest.halves()
        if self._first is not None:
            self._first.renew(deciding_TLH, judged_TLH)
        models: list[LayerModel] = []
        spreads, before, after = [], [], []
        errors: dict[int, ErrorEstimate] = {}
        old_errors: dict[int, ErrorEstimate] = {}
        for layer, ahead in enumerate(range(self._distance, len(self._gates))):
            self._pause()
            gate, model, spread = self._gates[ahead], old.models[layer], old.spreads[layer]
            truth = LayerTruth(judged_TLH, gate, ahead, layer)
            before.append(truth.score(model, spread))
            _note(old_errors, ahead, truth.error(model, spread))
            new = fitted.models[layer]
            new_spread = LayerTruth(deciding_TLH, gate, ahead, layer).spread(new)
            after.append(truth.score(new, new_spread))
            if after[-1] > before[-1]:
                model, spread = new, new_spread
            after[-1] = max(after[-1], before[-1])
            models.append(model)
            spreads.append(spread)
            _note(errors, ahead, truth.error(model, spread))
        old.errors = old_errors
        changed = sum(new is not known for new, known in zip(models, old.models, strict=True))
        accuracy_before, accuracy_after = float(np.mean(before)), float(np.mean(after))
        if not changed or accuracy_after - accuracy_before < self._options.least_gain:
            return None
        self.predictor = TrainedPredictor(
            models, self._distance, hidden=old.hidden, spreads=spreads, errors=errors
        )
        return Swap(
            predictor=self.predictor,
            layers=changed,
            fitted_tokens=round(ridge.tokens),
            judged_tokens=len(judged_TLH),
            accuracy_before=accuracy_before,
            accuracy_after=accuracy_after,
        )


def _note(errors: dict[int, ErrorEstimate], layer: int, error: ErrorEstimate | None) -> None:
    if error is not None:
        errors[layer] = error
