"""A perceptron per layer, trained from scratch: the large predictor that gates are held against.

Source: ProMoE (Song et al., 2024) trains such a model per layer; hidden -> 2 hidden -> experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moeless.core.router import RouterRule


class Mlp(NamedTuple):
    """One hidden layer, ReLU.

    Args:
        weight_in: [M, H], M = 2 H.
        bias_in: [M].
        weight_out: [E, M].
        bias_out: [E].
        rule: How experts are chosen from its logits: the K largest.
    """

    weight_in: Tensor
    bias_in: Tensor
    weight_out: Tensor
    bias_out: Tensor
    rule: RouterRule

    @property
    def correction(self) -> None:
        """None: logits were fitted to the choice itself."""
        return None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {
            "weight_in": self.weight_in,
            "bias_in": self.bias_in,
            "weight_out": self.weight_out,
            "bias_out": self.bias_out,
        }

    def logits(self, x_TH: Tensor) -> Tensor:
        """Log-odds [T, E] that experts are chosen for gate inputs [T, H]."""
        hidden_TM = torch.nn.functional.linear(
            x_TH.to(self.weight_in.dtype), self.weight_in, self.bias_in
        )
        return torch.nn.functional.linear(hidden_TM.relu_(), self.weight_out, self.bias_out)


def new_mlp(
    hidden: int,
    experts: int,
    rule: RouterRule,
    generator: torch.Generator,
    *,
    input_scale: float = 1.0,
) -> Mlp:
    """An untrained one, drawn as He et al. (2015) for ReLU.

    Args:
        hidden: H.
        experts: E.
        rule: The model's rule; only how many experts it chooses is kept.
        generator: Draws the weights.
        input_scale: Root mean square of the inputs it will see.
    """
    wide = 2 * hidden
    return Mlp(
        weight_in=torch.randn(wide, hidden, generator=generator)
        * ((2.0 / hidden) ** 0.5 / input_scale),
        bias_in=torch.zeros(wide),
        weight_out=torch.randn(experts, wide, generator=generator) * (1.0 / wide) ** 0.5,
        bias_out=torch.zeros(experts),
        rule=RouterRule(kind="topk_softmax", path=rule.path, top_k=rule.top_k),
    )
