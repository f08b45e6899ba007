"""Keeps re-fitting gates from a sample of live tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.errors import ConfigError
from moeless.learned.gate_predictor import Gate
from moeless.learned.judging import logit_error
from moeless.learned.ridge import RidgeSums, corrected, prior_residual
from moeless.learned.trained_predictor import TrainedPredictor

_SPREAD_PER_ERROR = 0.7
"""Part of the logits' error that is left to each one alone; what the trainer mostly finds."""


class OnlineRidge:
    """Running sums of all layers, in which old tokens count less and less.

    Adding tokens costs T x H x H multiplications per layer and solving H^3 / 3: both belong
    beside the token path, which only has to copy the gate inputs of a few tokens.

    Args:
        gates: The model's own.
        distance: d.
        layers: Predicted layers to fit; None fits all, from d on. Others keep the copied gate.
        half_life_tokens: After so many further tokens a token counts half.
        penalty: See ``RidgeSums.solve``.
        pause: Called between two layers.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        distance: int,
        *,
        layers: Sequence[int] | None = None,
        half_life_tokens: float = 50_000.0,
        penalty: float = 1e-2,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        if not 1 <= distance < len(gates):
            raise ConfigError(f"distance {distance}: use 1 to {len(gates) - 1}")
        for name, value in (("half_life_tokens", half_life_tokens), ("penalty", penalty)):
            if value <= 0.0:
                raise ConfigError(f"online ridge: {name} is {value}; it must be above 0")
        self._gates = [in_float32(gate) for gate in gates]
        self._distance, self._penalty, self._pause = distance, penalty, pause
        self._half_life_tokens = half_life_tokens
        experts, hidden = gates[0].weight.shape
        wanted = range(distance, len(gates)) if layers is None else sorted(layers)
        self._sums = {ahead: RidgeSums(hidden, experts) for ahead in wanted}
        self._errors: dict[int, float] = {}
        self._fitted: TrainedPredictor | None = None
        self._tokens = 0.0

    @property
    def rule(self) -> RouterRule:
        """How the gates choose."""
        return self._gates[0].rule

    @property
    def tokens(self) -> float:
        """Tokens that count, old ones less than one each."""
        return self._tokens

    @property
    def num_bytes(self) -> int:
        """Of the sums."""
        return sum(sums.num_bytes for sums in self._sums.values())

    def add(self, gate_input_TLH: Tensor) -> None:
        """Add tokens of which every layer's gate input was kept.

        Args:
            gate_input_TLH: Gate inputs [T, L, H], any float dtype.
        """
        tokens = len(gate_input_TLH)
        keep = 0.5 ** (tokens / self._half_life_tokens)
        for ahead, sums in self._sums.items():
            layer, gate = ahead - self._distance, self._gates[ahead]
            x_TH, ahead_TH = gate_input_TLH[:, layer].float(), gate_input_TLH[:, ahead].float()
            if self._fitted is not None:
                # Tokens that the fit has not seen yet tell how far off it is.
                error = logit_error(self._fitted.models[layer].logits(x_TH), gate.logits(ahead_TH))
                self._errors[ahead] = 0.8 * self._errors.get(ahead, error) + 0.2 * error
            sums.forget(keep)
            sums.add(x_TH, prior_residual(gate, gate, x_TH, ahead_TH))
            self._pause()
        self._tokens = self._tokens * keep + tokens

    def fit(self) -> TrainedPredictor:
        """The predictor as of now; with few tokens it is close to the copied gates."""
        models = list(self._gates[self._distance :])
        with torch.inference_mode():
            for ahead, sums in self._sums.items():
                models[ahead - self._distance] = corrected(
                    self._gates[ahead], sums.solve(self._penalty)
                )
                self._pause()
        self._fitted = TrainedPredictor(
            models,
            self._distance,
            hidden=self._gates[0].weight.shape[1],
            spreads=[
                _SPREAD_PER_ERROR * self._errors.get(ahead, 0.0)
                for ahead in range(self._distance, len(self._gates))
            ],
        )
        return self._fitted


def in_float32(gate: Gate) -> Gate:
    """A gate that takes and gives float32; where it is one, it is no copy."""
    return gate._replace(
        weight=gate.weight.detach().float(),
        bias=None if gate.bias is None else gate.bias.detach().float(),
    )
