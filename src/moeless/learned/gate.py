"""A copy of what a router computes before it chooses."""

from typing import NamedTuple

import torch
from torch import Tensor

from moeless.core.router import RouterRule


class Gate(NamedTuple):
    """What a gate computes.

    Args:
        weight: [E, H].
        bias: Added to the logits, [E], or None.
        rule: How experts are chosen from the logits.
        correction: Added to the scores for the choice only, [E], or None.
    """

    weight: Tensor
    bias: Tensor | None
    rule: RouterRule
    correction: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        parts = {"weight": self.weight, "bias": self.bias, "correction": self.correction}
        return {name: part for name, part in parts.items() if part is not None}

    def logits(self, x_TH: Tensor) -> Tensor:
        """Router logits [T, E] of gate inputs [T, H], bias included, in the weight's dtype."""
        return torch.nn.functional.linear(x_TH.to(self.weight.dtype), self.weight, self.bias)
