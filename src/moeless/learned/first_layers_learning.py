"""Learns the first d layers from live embeddings, and keeps what beats the mean load.

Must not know threads, clocks or engines: it is given tokens.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.first_layers import FirstLayers, FirstLayersRidge
from moeless.learned.gate_predictor import Gate
from moeless.learned.layer_truth import EMBEDDING, LayerTruth
from moeless.learned.live_options import LiveOptions, next_fit
from moeless.learned.newest_tokens import NewestTokens
from moeless.learned.online_ridge import in_float32


class FirstLayersFit:
    """Sums of old tokens, and gates fitted to them that were held against newer ones.

    Args:
        gates: The model's own of the first d layers, float32.
        pause: Called between pieces of work.
    """

    def __init__(self, gates: Sequence[Gate], pause: Callable[[], None]) -> None:
        self._gates, self._pause = list(gates), pause
        self._ridge = FirstLayersRidge(self._gates)
        self.used = FirstLayers({}, {}, {})
        """Of the first d layers, as far as they beat the mean load."""

    def add(self, tokens_TLH: Tensor) -> None:
        """Fit to gate inputs of at least the first d layers and, last, embeddings."""
        self._ridge.add(tokens_TLH[:, EMBEDDING], tokens_TLH[:, : len(self._gates)])
        self._pause()

    def renew(self, deciding_TLH: Tensor, judged_TLH: Tensor) -> None:
        """Take up the new gates of the first layers that are the best of what is known.

        That is the new ones, those in use, or none: what looks back is at best about as good as
        the mean load.

        Args:
            deciding_TLH: Tokens that decide how sure to be of logits.
            judged_TLH: Newer tokens that all are judged by.
        """
        used, gates = self.used, {}
        spreads: dict[int, float] = {}
        errors: dict[int, ErrorEstimate] = {}
        for layer, new in enumerate(self._ridge.fit()):
            self._pause()
            decided = LayerTruth(deciding_TLH, self._gates[layer], layer, EMBEDDING)
            truth = LayerTruth(judged_TLH, self._gates[layer], layer, EMBEDDING)
            spread = decided.spread(new)
            candidates = [(truth.score(new, spread), new, spread)]
            if layer in used.gates:
                known, sure = used.gates[layer], used.spreads[layer]
                candidates.append((truth.score(known, sure), known, sure))
            score, gate, spread = max(candidates, key=lambda candidate: candidate[0])
            if score > truth.score_of_mean(decided.mean_E):
                gates[layer], spreads[layer] = gate, spread
                error = truth.error(gate, spread)
                if error is not None:
                    errors[layer] = error
        self.used = FirstLayers(gates, spreads, errors)


class FirstLayersLearning:
    """Learns the first layers alone, where the others have a predictor that stays as it is.

    Args:
        gates: The model's own of the first d layers.
        options: How; those of memory have no meaning here.
        pause: Called between pieces of work.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        options: LiveOptions | None = None,
        *,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options = options or LiveOptions()
        self._fit = FirstLayersFit([in_float32(gate) for gate in gates], pause)
        self._newest = NewestTokens(options.held_out_tokens, options.chunk_tokens)
        self._fitted_tokens, self._fit_at_tokens = 0, options.first_fit_tokens

    @property
    def first_layers(self) -> FirstLayers:
        """In use now."""
        return self._fit.used

    def learn(self, tokens_TLH: Tensor) -> None:
        """Take live tokens, the newest last.

        Args:
            tokens_TLH: What entered the gates of the first d layers, and last the embedding
                [T, d + 1, H]; kept.
        """
        for chunk_TLH in self._newest.push(tokens_TLH):
            self._fit.add(chunk_TLH)
            self._fitted_tokens += len(chunk_TLH)
        if self._fitted_tokens >= self._fit_at_tokens:
            self._fit_at_tokens = next_fit(self._fitted_tokens, self._options)
            self._fit.renew(*self._newest.halves())
