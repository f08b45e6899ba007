"""What a Mixture-of-Experts model looks like to the function platform.

This module must not know how a checkpoint is stored (``core.checkpoint``) or which engine runs
the rest of the model.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from moeless.errors import ModelError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped"]
Dtype = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class FunctionId(NamedTuple):
    """One serverless function: one logical expert of one MoE layer of one model.

    ``layer`` counts MoE layers from 0; dense layers have no index here.
    """

    model: str
    layer: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The computation of one expert.

    For an input row x: ``down(act(gate(x)) * up(x))``. With ``swiglu_clamped`` (GPT-OSS) gate and
    up are clamped to ``limit``, the gate uses ``sigmoid(alpha * gate)`` and up is shifted by one.

    Args:
        hidden: H, the size of input and output rows.
        intermediate: I, the inner size.
        activation: The gate's activation.
        dtype: Of weights and activations.
        bias: Whether gate, up and down have biases.
        score_on: ``output`` weighs the expert's output with the routing weight; ``input`` weighs
            its input instead (Llama 4) and adds the output as it is.
        alpha: Slope of the clamped gate's sigmoid.
        limit: Bound of the clamped gate.
    """

    hidden: int
    intermediate: int
    activation: Activation = "silu"
    dtype: Dtype = "bfloat16"
    bias: bool = False
    score_on: Literal["output", "input"] = "output"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def num_parameters(self) -> int:
        """Parameters of one expert, biases included."""
        weights = 3 * self.hidden * self.intermediate
        biases = 2 * self.intermediate + self.hidden if self.bias else 0
        return weights + biases

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's parameters in ``dtype``, without any packing."""
        return self.num_parameters * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The routed experts of a model.

    Args:
        model_id: The id under which the model is served.
        family: Name of the model family, for example ``mixtral``.
        layer_ids: Absolute index of each MoE layer in the model, ascending; its length is L.
        num_experts: E, logical experts per layer.
        top_k: K, experts per token.
        expert: The shape that all routed experts share.

    Raises:
        ModelError: A count is not positive, or K exceeds E.
    """

    model_id: str
    family: str
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    expert: ExpertShape

    def __post_init__(self) -> None:
        if not self.layer_ids or self.num_experts < 1 or not 1 <= self.top_k <= self.num_experts:
            raise ModelError(
                f"{self.model_id}: {len(self.layer_ids)} MoE layers, {self.num_experts} experts, "
                f"top-{self.top_k} is not a Mixture of Experts"
            )

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.layer_ids)

    @property
    def num_functions(self) -> int:
        """L x E."""
        return self.num_layers * self.num_experts
