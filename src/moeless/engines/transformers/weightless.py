"""An experts module without weights: it hands routed tokens to a runtime.

It takes the place of a family's experts class while a model is built, through the patch API of
transformers, so that the engine allocates no expert at all.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

from moeless.errors import EngineError

BACKEND = "moeless"
"""Name of the experts implementation in transformers' registry."""

Runtime = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, hidden_states [T, H], top_k_index int64 [T, K], top_k_weights [T, K]) -> [T, H]``.

``layer`` counts MoE layers from 0. Where the family scores on the input (Llama 4), hidden states
are raw and the weights are the scores: the runtime scales the input and adds outputs unweighted.
Weights may be float32 while hidden states are not (Mixtral, DeepSeek-V3); the result has the
dtype of the hidden states.
"""

_patching = threading.Lock()


def run_experts(
    experts: "WeightlessExperts",
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Forward to the runtime that is attached; the experts implementation ``moeless``.

    Args:
        experts: The module.
        hidden_states: [T, H].
        top_k_index: int64 [T, K].
        top_k_weights: [T, K].

    Returns:
        Weighted and summed expert outputs [T, H].

    Raises:
        EngineError: No runtime is attached, or its result has another shape.
    """
    runtime = experts.moeless_runtime
    if runtime is None:
        raise EngineError(
            f"no expert runtime is attached to MoE layer {experts.moe_layer}; "
            f"call attach_runtime before the first forward pass"
        )
    output = runtime(experts.moe_layer, hidden_states, top_k_index, top_k_weights)
    if output.shape != hidden_states.shape:
        raise EngineError(
            f"the expert runtime returned {list(output.shape)} for MoE layer "
            f"{experts.moe_layer}, expected {list(hidden_states.shape)}"
        )
    return output


@use_experts_implementation
class WeightlessExperts(nn.Module):
    """Experts that are somewhere else.

    Args:
        config: The text model's configuration.
    """

    moeless_runtime: Runtime | None

    def __init__(self, config: Any) -> None:  # noqa: ARG002 - the decorator keeps it
        super().__init__()
        self.moe_layer = -1
        self.moeless_runtime = None

    def attach(self, runtime: Runtime | None) -> None:
        """Set what computes the experts; None detaches."""
        # Not through nn.Module, which would adopt a runtime that is a module itself.
        vars(self)["moeless_runtime"] = runtime

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Hand the tokens over, whatever experts implementation is configured."""
        return run_experts(self, hidden_states, top_k_index, top_k_weights)


@contextmanager
def replaced_class(class_name: str, replacement: type[nn.Module]) -> Iterator[None]:
    """Have transformers build ``replacement`` instead of one of its classes.

    One model at a time: the mapping is global to the process.

    Args:
        class_name: The class in a modelling file of transformers.
        replacement: What to build.
    """
    ALL_EXPERTS_FUNCTIONS.register(BACKEND, run_experts)
    # Keys are regular expressions that match anywhere in a name; anchors keep namesakes out.
    pattern = f"^{class_name}$"
    with _patching:
        register_patch_mapping({pattern: replacement})
        originals = _find_class(class_name)
        try:
            yield
        finally:
            unregister_patch_mapping([pattern])
            # transformers does not undo its patches when building the model fails.
            for module, original in originals:
                if getattr(module, class_name, None) is not original:
                    setattr(module, class_name, original)


def _find_class(class_name: str) -> list[tuple[Any, type]]:
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and isinstance(vars(module).get(class_name), type):
            found.append((module, vars(module)[class_name]))
    return found
