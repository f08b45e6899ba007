"""Predicts the load of a later layer by asking a copy of its gate early."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moeless.core.plan import CountArray
from moeless.core.router import RouterRule
from moeless.errors import ConfigError, ModelError
from moeless.learned.expected_shares import expected_shares
from moeless.learned.gate import Gate
from moeless.learned.load_predictor import Reads
from moeless.learned.narrow_gate import narrowed
from moeless.learned.scoring import count_choices

__all__ = ["Gate", "GatePredictor"]


class GatePredictor:
    """Copies of a model's gates, each applied to the gate input of a layer further down.

    Residual connections keep hidden states similar from layer to layer, so that the gate of layer
    l + d, given what enters the gate of layer l, already chooses nearly the experts that it will.

    Args:
        gates: One per MoE layer; plain tuples in the order of ``Gate`` are accepted. Tensors are
            copied, so that neither fine-tuning here nor freeing them there touches the other.
        distance: d, how many layers ahead to predict, at least 1.
        dtype: Of the copies; None keeps each gate's own. A rule that asks for float32 logits
            gets float32.

    Raises:
        ConfigError: The distance is not positive.
        ModelError: There is no gate, or tensors and rule do not fit together.

    Source: MoEless paper, section 4.1 (speculative prediction), without the fine-tuning.
    Cost: one T x H x E product, the choice, and a count; runs on the token path.
    """

    def __init__(
        self,
        gates: Sequence[Gate | tuple[Tensor, Tensor | None, RouterRule]],
        distance: int = 1,
        *,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if distance < 1:
            raise ConfigError(f"prediction distance {distance} is not positive; use for example 1")
        if not gates:
            raise ModelError("a gate predictor needs the gate of each MoE layer, got none")
        self._distance = distance
        self._gates = [_copied(Gate(*gate), layer, dtype) for layer, gate in enumerate(gates)]
        self._asked = [narrowed(gate) for gate in self._gates]

    @property
    def distance(self) -> int:
        """How many layers ahead it predicts."""
        return self._distance

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self._gates)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(
            part.numel() * part.element_size()
            for gate in self._gates
            for part in gate.tensors.values()
        )

    @property
    def reads(self) -> Reads:
        """What enters a gate."""
        return "gate_input"

    def predict(self, layer: int, x_TH: Tensor) -> CountArray | None:
        """Expected tokens per expert of layer ``layer + distance``.

        Args:
            layer: The MoE layer whose gate is about to run.
            x_TH: Its gate input [..., H], on the device of the gates, any float dtype.

        Returns:
            int64 [E], summing to T x K; None where the model has no such layer.
        """
        if layer + self._distance >= len(self._gates):
            return None
        gate = self._gates[layer + self._distance]
        with torch.inference_mode():
            logits_TE = self._logits(layer + self._distance, x_TH)
            counts: CountArray = count_choices(logits_TE, gate.rule, gate.correction).cpu().numpy()
        return counts

    def shares(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """1 for each expert that the copied gate chooses for a token, float32 [T, E]."""
        if layer + self._distance >= len(self._gates):
            return None
        gate = self._gates[layer + self._distance]
        with torch.inference_mode():
            logits_TE = self._logits(layer + self._distance, x_TH)
            return expected_shares(logits_TE, gate.rule, gate.correction)

    def _logits(self, ahead: int, x_TH: Tensor) -> Tensor:
        logits_TE: Tensor = self._asked[ahead].logits(
            x_TH.reshape(-1, self._gates[ahead].weight.shape[1])
        )
        return logits_TE


def _copied(gate: Gate, layer: int, dtype: torch.dtype | None) -> Gate:
    weight, bias, rule, correction = gate
    if weight.ndim != 2 or not 1 <= rule.top_k <= weight.shape[0]:
        raise ModelError(
            f"gate of MoE layer {layer}: weight {tuple(weight.shape)} cannot choose "
            f"{rule.top_k} experts; expected [experts, hidden]"
        )
    experts = weight.shape[0]
    for name, vector in (("bias", bias), ("correction bias", correction)):
        if vector is not None and tuple(vector.shape) != (experts,):
            raise ModelError(
                f"gate of MoE layer {layer}: {name} {tuple(vector.shape)}, expected ({experts},)"
            )
    if experts % rule.num_groups or not 1 <= rule.top_groups <= rule.num_groups:
        raise ModelError(
            f"gate of MoE layer {layer}: {experts} experts cannot form {rule.num_groups} groups "
            f"of which {rule.top_groups} are chosen"
        )
    wanted = torch.float32 if rule.float32_logits else (dtype or weight.dtype)
    return Gate(
        weight=weight.detach().to(wanted, copy=True).contiguous(),
        bias=None if bias is None else bias.detach().to(wanted, copy=True),
        rule=rule,
        correction=None
        if correction is None
        else correction.detach().to(torch.float32, copy=True),
    )
