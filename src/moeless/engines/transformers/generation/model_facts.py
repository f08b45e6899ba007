"""What the engine must know of a loaded model before it serves it."""

from typing import Any

from moeless.errors import ModelError

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def generation_eos_ids(model: Any) -> frozenset[int]:
    """Ids that the model's generation config names as the end of a text: none, one or several."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos]) if isinstance(eos, int) else frozenset(eos)


def require_served_layers(config: Any) -> None:
    """Check that all state of the model's layers is keys and values.

    Args:
        config: A transformers text config.

    Raises:
        ModelError: Some layers keep other state, which rows that join and leave would mix up.
    """
    unknown = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if unknown:
        raise ModelError(
            f"layers of type {', '.join(sorted(unknown))} cannot be served: "
            f"only {', '.join(sorted(_SERVED_LAYER_TYPES))} keep all state in keys and values"
        )
