"""The parameters of one expert in the form that every invoker computes with."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """One expert's parameters: contiguous tensors, all of one dtype.

    Each has memory of its own unless they were read to a ``ReadMemory``.

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

    @property
    def is_joined(self) -> bool:
        """Whether gate and up lie one behind the other."""
        gate, up = self.gate, self.up
        return up.data_ptr() == gate.data_ptr() + gate.nbytes and (
            up.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()
        )

    @property
    def gate_up(self) -> torch.Tensor:
        """Gate and up side by side [2I, H]: a view where they lie one behind the other."""
        gate, up = self.gate, self.up
        if self.is_joined:
            inner, hidden = gate.shape
            return gate.as_strided((2 * inner, hidden), (hidden, 1))
        return torch.cat([gate, up])

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All parameters that exist, weights first."""
        every = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors())
