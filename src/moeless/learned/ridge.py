"""Ridge regression from running sums: the closed form of re-fitting a gate.

Only X'X and X'Y are kept, so that any number of tokens needs the memory of none, and live
tokens may be added at any time. What is penalised is the distance from a prior, the copied gate:
few tokens or a large penalty give back the gate as it was.
"""

import torch
from torch import Tensor

from moeless.learned.gate_predictor import Gate

_BIAS_PENALTY = 1e-6
"""Of the bias, relative to the weights' penalty: next to none, but never singular."""


class RidgeSums:
    """Running sums of one regression with a bias.

    Args:
        hidden: H, inputs.
        outputs: E, or several times E for several targets of the same inputs.
    """

    def __init__(self, hidden: int, outputs: int) -> None:
        self.tokens = 0.0
        self._gram = torch.zeros(hidden + 1, hidden + 1, dtype=torch.float64)
        self._cross = torch.zeros(hidden + 1, outputs, dtype=torch.float64)

    @property
    def num_bytes(self) -> int:
        """Memory of the sums."""
        return 8 * (self._gram.numel() + self._cross.numel())

    def add(self, x_TH: Tensor, residual_TE: Tensor) -> None:
        """Add tokens.

        Products are taken in float32 and summed in float64; give a few thousand tokens at a time.

        Args:
            x_TH: Inputs [T, H].
            residual_TE: What the prior gets wrong: true minus prior outputs [T, E].
        """
        x1 = torch.nn.functional.pad(x_TH.float(), (0, 1), value=1.0)
        self._gram += x1.T @ x1
        self._cross += x1.T @ residual_TE.float()
        self.tokens += len(x1)

    def forget(self, keep: float) -> None:
        """Weigh what was added so far by a factor below 1."""
        self.tokens *= keep
        self._gram *= keep
        self._cross *= keep

    def solve(self, penalty: float) -> Tensor:
        """Best correction of the prior.

        Args:
            penalty: Above 0; relative to the inputs' mean square, so that one value suits any
                scale.

        Returns:
            float64 [H + 1, E], the bias in the last row; zeros without tokens.
        """
        if self.tokens == 0.0:
            return torch.zeros_like(self._cross)
        strength = penalty * float(self._gram.diagonal()[:-1].mean().clamp(min=1e-30))
        ridge = self._gram.clone()
        ridge.diagonal()[:-1] += strength
        ridge.diagonal()[-1] += _BIAS_PENALTY * strength
        return torch.cholesky_solve(self._cross, torch.linalg.cholesky(ridge))


def prior_residual(prior: Gate, true: Gate, x_TH: Tensor, ahead_TH: Tensor) -> Tensor:
    """What a copied gate gets wrong when it is asked early.

    Args:
        prior: The copied gate.
        true: The model's own gate of the layer ahead.
        x_TH: Hidden states that the copy is asked with [T, H].
        ahead_TH: Gate inputs of the layer ahead, same tokens [T, H].

    Returns:
        True minus prior logits [T, E].
    """
    return true.logits(ahead_TH) - prior.logits(x_TH)


def corrected(prior: Gate, correction: Tensor) -> Gate:
    """A prior with the solution of a regression added.

    Args:
        prior: The copied gate.
        correction: As ``RidgeSums.solve`` gives it [H + 1, E].

    Returns:
        A gate of the prior's rule, float32, with a bias.
    """
    bias_E = correction[-1].float()
    return prior._replace(
        weight=(prior.weight.double() + correction[:-1].T).float().contiguous(),
        bias=bias_E if prior.bias is None else prior.bias.float() + bias_E,
    )
