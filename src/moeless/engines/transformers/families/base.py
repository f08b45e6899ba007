"""What every model family says about itself."""

import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from moeless.core.checkpoint import ExpertLayout
from moeless.core.model import DTYPE_BYTES, Activation, ExpertShape, ModelSpec
from moeless.core.router import RouterRule
from moeless.engines.transformers.quantization import fp8_block_size
from moeless.errors import CheckpointError, ModelError
from moeless.functions.store.index import CheckpointIndex

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Family(ABC):
    """One Mixture-of-Experts architecture.

    All methods take the configuration as ``config.json`` gives it; a family that wraps a text
    model in something larger unwraps it with ``text_config``.
    """

    name: ClassVar[str]
    """Name for specs and messages."""
    model_types: ClassVar[tuple[str, ...]]
    """Values of ``model_type`` that belong to it."""
    model_class: ClassVar[str]
    """The causal language model in transformers."""
    experts_class: ClassVar[str]
    """The class in the modelling file that is replaced by one without weights."""
    block: ClassVar[str]
    """Attribute of a decoder layer that holds the MoE block."""
    router: ClassVar[str]
    """Attribute of the block that holds the router; experts are always at ``experts``."""
    expert_keys: ClassVar[re.Pattern[str]] = re.compile(r"\.experts\.")
    """Finds the names of routed experts' weights, which the engine must not load."""

    def text_config(self, config: "PreTrainedConfig") -> "PreTrainedConfig":
        """The configuration of the language model itself."""
        return config

    def key_prefix(self, config: "PreTrainedConfig") -> str:  # noqa: ARG002 - for wrappers
        """What precedes the language model's own weight names."""
        return ""

    @abstractmethod
    def layer_ids(self, config: "PreTrainedConfig") -> tuple[int, ...]:
        """Absolute indices of the MoE layers, ascending; empty for a dense variant."""

    @abstractmethod
    def num_experts(self, config: "PreTrainedConfig") -> int:
        """E, routed experts per layer."""

    @abstractmethod
    def expert_shape(self, config: "PreTrainedConfig") -> ExpertShape:
        """The computation of one expert, in the configuration's dtype."""

    @abstractmethod
    def candidates(self, layer_prefix: str) -> tuple[ExpertLayout, ...]:
        """Layouts that are found in checkpoints, most usual first.

        Args:
            layer_prefix: What precedes the names in a decoder layer, with ``{layer}`` in it.
        """

    @abstractmethod
    def router_rule(self, config: "PreTrainedConfig") -> RouterRule:
        """How the routers choose."""

    def spec(self, config: "PreTrainedConfig", model_id: str) -> ModelSpec:
        """Describe the routed experts.

        Args:
            config: The model's configuration; its dtype becomes the experts'.
            model_id: The id under which the model is served.

        Raises:
            ModelError: The model is dense, or its activation or dtype is not known.
        """
        layer_ids = self.layer_ids(config)
        if not layer_ids or self.num_experts(config) < 1:
            raise ModelError(f"{model_id} is a dense model: no experts to serve")
        return ModelSpec(
            model_id=model_id,
            family=self.name,
            layer_ids=layer_ids,
            num_experts=self.num_experts(config),
            top_k=self.router_rule(config).top_k,
            expert=self.expert_shape(config),
        )

    def layout(self, config: "PreTrainedConfig", index: CheckpointIndex) -> ExpertLayout:
        """Find out how a checkpoint stores the experts.

        Args:
            config: The model's configuration.
            index: The checkpoint's tensors.

        Raises:
            CheckpointError: Experts are stored in no known way, or in FP8 without block scales.
        """
        first = self.layer_ids(config)[0]
        tried = []
        for layout in self.candidates(f"{self.key_prefix(config)}model.layers.{{layer}}."):
            key = layout.gate_up.keys[0].format(layer=first, expert=0)
            if layout.gate_up.codec == "mxfp4":
                key += "_blocks"
            if key in index:
                return self._with_codec(layout, config, index, key)
            tried.append(key)
        raise CheckpointError(
            f"key {' or '.join(tried)} is missing from {index.directory}: "
            f"it has no expert weights of the {self.name} family"
        )

    def _with_codec(
        self, layout: ExpertLayout, config: "PreTrainedConfig", index: CheckpointIndex, key: str
    ) -> ExpertLayout:
        if not index.entry(key).dtype.startswith("F8"):
            return layout
        block = fp8_block_size(config)
        if block is None:
            raise CheckpointError(
                f"tensor {key} is FP8, but config.json of {index.directory} gives no "
                f"weight_block_size: only FP8 with 2-D block scales can be read"
            )
        encoded: dict[str, Any] = {"codec": "fp8_block", "block": block}
        return replace(
            layout,
            gate_up=replace(layout.gate_up, **encoded),
            down=replace(layout.down, **encoded),
        )


def shape_of(config: Any, intermediate: int, **more: Any) -> ExpertShape:
    """An expert's shape from the fields that all configurations share.

    Raises:
        ModelError: An activation or dtype that expert functions do not compute.
    """
    if "activation" not in more:
        activation = _ACTIVATIONS.get(str(config.hidden_act))
        if activation is None:
            known = ", ".join(sorted(_ACTIVATIONS))
            raise ModelError(
                f"{config.model_type}: hidden_act {config.hidden_act!r} is not known; "
                f"known are {known}"
            )
        more["activation"] = activation
    dtype: Any = str(config.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(
            f"{config.model_type}: dtype {dtype} is not served; use one of "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return ExpertShape(hidden=config.hidden_size, intermediate=intermediate, dtype=dtype, **more)
