"""The parameters of one expert in the form that every invoker computes with."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """One expert's parameters: contiguous tensors with memory of their own, all of one dtype.

    Args:
        gate: Gate projection [I, H].
        up: Up projection [I, H].
        down: Down projection [H, I].
        gate_bias: [I], or None where the family has no biases.
        up_bias: [I] or None.
        down_bias: [H] or None.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All parameters that exist, weights first."""
        every = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors())
