"""Gates that compute in bfloat16 where the hidden states are bfloat16 and it is faster.

A forecast does not need more: rounding moves a logit by less than half a percent, predicting it
some layers early by tens of percent.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.learned.gate import Gate

_NARROW_FROM_MACS = 600_000
"""Multiplications from which bfloat16 is faster on one core: below it, its call costs more than
converting the states and multiplying in float32 (docs/log.md)."""


class NarrowGate:
    """A gate with a second copy of its weight, in bfloat16, made when it is first needed.

    Args:
        gate: The gate; asked itself for few tokens, and for states that are not bfloat16.

    Cost: half the bytes of a float32 gate once more.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._weight: Tensor | None = None
        self._fast = is_bfloat16_fast(gate.weight.device.type)

    @property
    def rule(self) -> RouterRule:
        """The gate's."""
        return self.gate.rule

    @property
    def correction(self) -> Tensor | None:
        """The gate's."""
        return self.gate.correction

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The gate's: the second copy is no parameter."""
        return self.gate.tensors

    def logits(self, x_TH: Tensor) -> Tensor:
        """Router logits, float32 or the gate's dtype [T, E], of gate inputs [T, H]."""
        gate = self.gate
        macs = x_TH.numel() * gate.weight.shape[0]
        if x_TH.dtype != torch.bfloat16 or not self._fast or macs < _NARROW_FROM_MACS:
            return gate.logits(x_TH)
        if self._weight is None:
            self._weight = gate.weight.to(torch.bfloat16)
        logits_TE = torch.nn.functional.linear(x_TH, self._weight).float()
        return logits_TE if gate.bias is None else logits_TE.add_(gate.bias)


def narrowed(model: Any) -> Any:
    """A gate that may compute in bfloat16; what is no float32 gate is given back as it is.

    Args:
        model: A ``Gate`` or another model of a layer.
    """
    if isinstance(model, Gate) and model.weight.dtype == torch.float32:
        return NarrowGate(model)
    return model


@cache
def is_bfloat16_fast(device: str) -> bool:
    """Whether a kind of device multiplies bfloat16 itself instead of converting it.

    Args:
        device: ``cpu``, ``cuda`` and so on.
    """
    if device != "cpu":
        return True
    mkldnn: Any = torch.backends.mkldnn
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(mkldnn.is_available() and supported is not None and supported())
