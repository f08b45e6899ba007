"""Three ways of fitting layers, behind one port: read tokens, offer candidates, finish one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.gate_predictor import Gate
from moeless.learned.gradient import finetune_gate, train_mlp
from moeless.learned.judging import Judge
from moeless.learned.layer_tokens import LayerTokens, gather
from moeless.learned.mlp import new_mlp
from moeless.learned.ridge import RidgeSums, corrected, prior_residual
from moeless.learned.token_rows import TokenRows
from moeless.learned.trained_predictor import LayerModel
from moeless.learned.training_options import TrainingOptions

_LOGISTIC_SPREAD = 1.7
"""Standard deviation at which a normal error turns log-odds into their probabilities."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A model of one layer.

    Args:
        model: The model.
        spread: See ``expected_shares``.
        score: The judge's, on the tokens that decide.
        penalty: Ridge penalty, if it has one.
        epochs: Passes that descending made.
        error_scale: Typical error of its logits where they cannot be held against the true ones.
    """

    model: LayerModel
    spread: float = 0.0
    score: float = 0.0
    penalty: float | None = None
    epochs: int = 0
    error_scale: float | None = None


class LayerFitter(Protocol):
    """Fits a group of layers."""

    def read(self, rows: TokenRows, on_share: Callable[[float], None]) -> None:
        """Take the tokens to fit to; told the share of them that is read."""
        ...

    def candidates(self, ahead: int, tokens: LayerTokens, judge: Judge) -> Iterator[Fitted]:
        """Models of a layer, to choose from by tokens that were not fitted to."""
        ...

    def finish(self, ahead: int, chosen: Fitted, tokens: LayerTokens) -> Fitted:
        """The chosen one, where possible fitted to the deciding tokens as well."""
        ...


def make_fitter(
    gates: Sequence[Gate], layers: Sequence[int], options: TrainingOptions
) -> LayerFitter:
    """The fitter of a method.

    Args:
        gates: The model's own, of all layers.
        layers: Layers to fit.
        options: How.
    """
    if options.method == "ridge":
        return _RidgeFitter(gates, layers, options)
    return _DescentFitter(gates, options)


class _RidgeFitter:
    """Sums of all layers of the group in one pass."""

    def __init__(
        self, gates: Sequence[Gate], layers: Sequence[int], options: TrainingOptions
    ) -> None:
        experts, hidden = gates[0].weight.shape
        self._gates, self._options = gates, options
        self._sums = {ahead: RidgeSums(hidden, experts) for ahead in layers}

    def read(self, rows: TokenRows, on_share: Callable[[float], None]) -> None:
        distance, reads = self._options.distance, self._options.reads
        done = 0
        for chunk in rows:
            for ahead, sums in self._sums.items():
                x_TH = chunk.states(ahead - distance, reads)
                sums.add(
                    x_TH,
                    prior_residual(
                        self._prior(ahead), self._gates[ahead], x_TH, chunk.states(ahead)
                    ),
                )
            done += len(x_TH)
            on_share(done / rows.tokens)

    def candidates(self, ahead: int, tokens: LayerTokens, judge: Judge) -> Iterator[Fitted]:
        del tokens, judge
        for penalty in self._options.penalties:
            yield Fitted(
                model=corrected(self._prior(ahead), self._sums[ahead].solve(penalty)),
                penalty=penalty,
            )

    def finish(self, ahead: int, chosen: Fitted, tokens: LayerTokens) -> Fitted:
        assert chosen.penalty is not None
        prior, sums = self._prior(ahead), self._sums.pop(ahead)
        sums.add(tokens.inputs_TH, tokens.true_logits_TE - prior.logits(tokens.inputs_TH))
        return replace(chosen, model=corrected(prior, sums.solve(chosen.penalty)))

    def _prior(self, ahead: int) -> Gate:
        gate = self._gates[ahead]
        if self._options.reads == "gate_input":
            return gate
        # What enters a layer is not normalised; its gate says nothing about it.
        return gate._replace(weight=torch.zeros_like(gate.weight), bias=None)


class _DescentFitter:
    """Gradient descent, one layer at a time; tokens are gathered when a layer's turn comes."""

    def __init__(self, gates: Sequence[Gate], options: TrainingOptions) -> None:
        self._gates, self._options = gates, options
        self._rows: TokenRows | None = None

    def read(self, rows: TokenRows, on_share: Callable[[float], None]) -> None:
        del on_share
        self._rows = rows

    def candidates(self, ahead: int, tokens: LayerTokens, judge: Judge) -> Iterator[Fitted]:
        assert self._rows is not None
        options, gate = self._options, self._gates[ahead]
        fit = gather(self._rows, gate, ahead=ahead, distance=options.distance, reads=options.reads)
        experts, hidden = gate.weight.shape
        true_TE = one_hot(tokens.ids_TK, experts)

        def accuracy(model: LayerModel) -> float:
            with torch.inference_mode():
                logits_TE = model.logits(tokens.inputs_TH)
                share_TE = expected_shares(logits_TE, model.rule, model.correction)
            return judge.accuracy(share_TE, true_TE)

        if options.method == "finetune":
            model, epochs = finetune_gate(
                gate,
                fit.inputs_TH,
                fit.true_logits_TE,
                judge=accuracy,
                options=options.descent,
                enough=1.0 if options.all_layers else options.threshold,
            )
            if model is not gate:
                yield Fitted(model=model, epochs=epochs)
            return
        generator = torch.Generator().manual_seed(options.seed + ahead)
        mlp, epochs = train_mlp(
            new_mlp(hidden, experts, gate.rule, generator, input_scale=_scale(fit.inputs_TH)),
            fit.inputs_TH,
            one_hot(fit.ids_TK, experts),
            judge=accuracy,
            options=options.descent,
        )
        yield Fitted(model=mlp, epochs=epochs, error_scale=_LOGISTIC_SPREAD)

    def finish(self, ahead: int, chosen: Fitted, tokens: LayerTokens) -> Fitted:
        del ahead, tokens
        return chosen


def _scale(inputs_TH: torch.Tensor) -> float:
    """Root mean square."""
    return max(float(inputs_TH.pow(2).mean().sqrt()), 1e-12)
