"""What the engine must know of a loaded model before it serves it."""

import logging
import math
from collections.abc import Callable
from typing import Any

from moeless.core.generation import SamplingDefaults
from moeless.errors import ModelError

logger = logging.getLogger(__name__)

_USABLE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: 0 <= value < 2**31 and value == int(value),
}
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def generation_eos_ids(model: Any) -> frozenset[int]:
    """Ids that the model's generation config names as the end of a text: none, one or several."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos]) if isinstance(eos, int) else frozenset(eos)


def advised_sampling(generation_config: Any) -> SamplingDefaults:
    """What a generation config advises to sample with; its ``do_sample`` is not heeded.

    Args:
        generation_config: A transformers generation config. A value that nobody could sample with
            is left out, with a warning.
    """
    neutral = SamplingDefaults()
    found: dict[str, Any] = {}
    for name, usable in _USABLE.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        if isinstance(value, int | float) and usable(value):
            found[name] = type(getattr(neutral, name))(value)
        else:
            logger.warning("generation_config.json has %s %r, which is left out", name, value)
    return SamplingDefaults(**found)


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
