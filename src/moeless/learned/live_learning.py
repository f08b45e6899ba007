"""Learns from live gate inputs, and says when what it learnt is better than what is in use.

Must not know threads, clocks or engines: it is given tokens, and answers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeless.errors import ConfigError
from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.first_layers import FirstLayers, FirstLayersRidge, embedding_features
from moeless.learned.gate_predictor import Gate
from moeless.learned.judging import best_spread, judge_of, logit_error
from moeless.learned.online_ridge import OnlineRidge, in_float32
from moeless.learned.scoring import choose
from moeless.learned.trained_predictor import LayerModel, TrainedPredictor

_log = logging.getLogger(__name__)

_EMBEDDING = -1
"""Stands for the embedding where a layer's gate input could stand."""


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """How live traffic is learnt from.

    Args:
        held_out_tokens: The newest tokens, which are judged by and not yet fitted to. The older
            half of them decides how sure to be of logits, the newer one is judged by.
        first_fit_tokens: Tokens after which the first fit is made.
        fit_growth: The next is made when so many times as many tokens have been fitted to.
        longest_fit_interval: Tokens after which the next is made in any case.
        chunk_tokens: Tokens that are added at once.
        least_gain: Mean load accuracy over all layers that a new predictor has to win.
        max_sums_bytes: Memory for running sums. Where it is too small for all layers, those whose
            copied gate is the least accurate are fitted.
        max_held_out_bytes: Memory for held-out tokens; fewer are kept where it is too small.

    Raises:
        ConfigError: A number is out of range.
    """

    held_out_tokens: int = 1024
    first_fit_tokens: int = 512
    fit_growth: float = 1.5
    longest_fit_interval: int = 8192
    chunk_tokens: int = 256
    least_gain: float = 0.005
    max_sums_bytes: int = 3 * 2**29
    max_held_out_bytes: int = 2**29

    def __post_init__(self) -> None:
        counts = (
            self.held_out_tokens // 2,
            self.first_fit_tokens,
            self.longest_fit_interval,
            self.chunk_tokens,
            self.max_sums_bytes,
            self.max_held_out_bytes,
        )
        if min(counts) < 1 or self.fit_growth <= 1.0 or self.least_gain < 0.0:
            raise ConfigError(f"live learning: a number is out of range in {self}")


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
        options: LiveOptions = LiveOptions(),
        *,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        if not 1 <= distance < len(gates):
            raise ConfigError(f"distance {distance}: use 1 to {len(gates) - 1}")
        self._gates = [in_float32(gate) for gate in gates]
        self._distance, self._options, self._pause = distance, options, pause
        self.predictor = TrainedPredictor(
            self._gates[distance:], distance, hidden=gates[0].weight.shape[1]
        )
        """In use; copied gates at first. Replaced, never changed but for its error estimates."""
        self.first_layers = FirstLayers({}, {}, {})
        """Of the first d layers, as far as they beat the mean load; needs embeddings."""
        self._first_ridge: FirstLayersRidge | None = None
        self._newest: list[Tensor] = []
        self._ridge: OnlineRidge | None = None
        self._fit_at_tokens = options.first_fit_tokens
        self._fitted_tokens = 0
        self.skipped_tokens = 0
        """Tokens left out because they were not finite."""

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
        finite_T = gate_input_TLH.isfinite().all(dim=-1).all(dim=-1)
        if not bool(finite_T.all()):
            self.skipped_tokens += int((~finite_T).sum())
            gate_input_TLH = gate_input_TLH[finite_T]
        self._newest.append(gate_input_TLH)
        chunk = self._options.chunk_tokens
        while sum(map(len, self._newest)) >= self.held_out_tokens + chunk:
            tokens = torch.cat(self._newest)
            self._newest = [tokens[chunk:].clone()]
            self._add(tokens[:chunk])
        if self._ridge is None or self._fitted_tokens < self._fit_at_tokens:
            return None
        longest = self._fitted_tokens + self._options.longest_fit_interval
        growth = self._options.fit_growth
        self._fit_at_tokens = min(longest, int(growth * self._fitted_tokens))
        return self._compare(self._ridge)

    def _add(self, tokens_TLH: Tensor) -> None:
        if self._ridge is None:
            self._ridge = OnlineRidge(
                self._gates, self._distance, layers=self._choose_layers(), pause=self._pause
            )
        self._ridge.add(tokens_TLH)
        self._fitted_tokens += len(tokens_TLH)
        if tokens_TLH.shape[1] > len(self._gates):
            if self._first_ridge is None:
                self._first_ridge = FirstLayersRidge(self._gates[: self._distance])
            self._first_ridge.add(tokens_TLH[:, -1], tokens_TLH[:, : self._distance])
            self._pause()

    def _choose_layers(self) -> list[int]:
        """Layers to fit: all that memory is enough for, the least accurate first."""
        ahead = list(range(self._distance, len(self._gates)))
        experts, hidden = self._gates[0].weight.shape
        sums_bytes = 8 * (hidden + 1) * (hidden + 1 + experts)
        affordable = max(1, self._options.max_sums_bytes // sums_bytes)
        if affordable >= len(ahead):
            return ahead
        tokens = torch.cat(self._newest)
        accuracy = {}
        for layer in ahead:
            truth = _LayerTruth(tokens, self._gates[layer], layer, layer - self._distance)
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
        held_out = torch.cat(self._newest)[-self.held_out_tokens :]
        middle = len(held_out) // 2
        if self._first_ridge is not None:
            self._replace_first(self._first_ridge, held_out[:middle], held_out[middle:])
        models: list[LayerModel] = []
        spreads, before, after = [], [], []
        errors: dict[int, ErrorEstimate] = {}
        old_errors: dict[int, ErrorEstimate] = {}
        for layer, ahead in enumerate(range(self._distance, len(self._gates))):
            self._pause()
            gate, model, spread = self._gates[ahead], old.models[layer], old.spreads[layer]
            truth = _LayerTruth(held_out[middle:], gate, ahead, layer)
            before.append(truth.score(model, spread))
            _note(old_errors, ahead, truth.error(model, spread))
            new = fitted.models[layer]
            new_spread = _LayerTruth(held_out[:middle], gate, ahead, layer).spread(new)
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
            judged_tokens=len(held_out) - middle,
            accuracy_before=accuracy_before,
            accuracy_after=accuracy_after,
        )

    def _replace_first(
        self, ridge: FirstLayersRidge, deciding_TLH: Tensor, judged_TLH: Tensor
    ) -> None:
        """Take up the new gates of the first layers that are the best of what is known.

        That is the new ones, those in use, or none: what looks back is at best about as good as
        the mean load.
        """
        used, gates = self.first_layers, {}
        spreads: dict[int, float] = {}
        errors: dict[int, ErrorEstimate] = {}
        for layer, new in enumerate(ridge.fit()):
            self._pause()
            decided = _LayerTruth(deciding_TLH, self._gates[layer], layer, _EMBEDDING)
            truth = _LayerTruth(judged_TLH, self._gates[layer], layer, _EMBEDDING)
            spread = decided.spread(new)
            candidates = [(truth.score(new, spread), new, spread)]
            if layer in used.gates:
                known, sure = used.gates[layer], used.spreads[layer]
                candidates.append((truth.score(known, sure), known, sure))
            score, gate, spread = max(candidates, key=lambda candidate: candidate[0])
            if score > truth.score_of_mean(decided.mean_E):
                gates[layer], spreads[layer] = gate, spread
                _note(errors, layer, truth.error(gate, spread))
        self.first_layers = FirstLayers(gates, spreads, errors)


class _LayerTruth:
    """What a layer chose for some tokens in the order of arrival, to hold predictions against.

    Args:
        tokens_TLH: Gate inputs of all layers, and perhaps embeddings.
        gate: The layer's own gate.
        ahead: The layer.
        source: The layer whose gate input it is predicted from, or the embedding.
    """

    def __init__(self, tokens_TLH: Tensor, gate: Gate, ahead: int, source: int) -> None:
        inputs_TH = tokens_TLH[:, source]
        self._inputs_TH = (
            embedding_features(inputs_TH) if source == _EMBEDDING else inputs_TH.float()
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


def _note(errors: dict[int, ErrorEstimate], layer: int, error: ErrorEstimate | None) -> None:
    if error is not None:
        errors[layer] = error
