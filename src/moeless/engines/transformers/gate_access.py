"""A model's gates and what enters them: for those who learn from them.

What enters a gate also enters its layer's experts, in every family, so that whoever runs the
experts sees the gate's input; only the input of the whole decoder layer needs a hook.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from moeless.engines.transformers.families import family_for
from moeless.learned.gate_predictor import Gate


def find_gates(model: Any, layer_ids: Sequence[int]) -> list[Gate]:
    """The gates of a loaded model; their tensors are the model's own, not copies.

    Args:
        model: A causal language model of a known family.
        layer_ids: The model's own index of each MoE layer.

    Raises:
        ModelError: An unknown family.
    """
    config = model.config.get_text_config()
    rule = family_for(config).router_rule(config)
    gates = []
    for layer_id in layer_ids:
        router = model.get_submodule(f"model.layers.{layer_id}.{rule.path}")
        bias = router.bias if rule.has_bias else None
        correction = getattr(router, rule.correction_bias) if rule.correction_bias else None
        gates.append(Gate(router.weight, bias, rule, correction))
    return gates


@contextmanager
def observed_layer_inputs(
    model: Any, layer_ids: Sequence[int], observer: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Have somebody told what enters each decoder layer, before the norm of its attention.

    Args:
        model: A causal language model of a known family.
        layer_ids: The model's own index of each MoE layer; others are not told of.
        observer: Gets the MoE layer, counted from 0, and its input [T, H]. Called on the
            engine's thread; must not keep the tensor.
    """

    def observe(layer: int) -> Callable[..., None]:
        def hook(_module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            state = arguments[0] if arguments else named["hidden_states"]
            observer(layer, state.reshape(-1, state.shape[-1]))

        return hook

    handles = [
        model.get_submodule(f"model.layers.{layer_id}").register_forward_pre_hook(
            observe(layer), with_kwargs=True
        )
        for layer, layer_id in enumerate(layer_ids)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
