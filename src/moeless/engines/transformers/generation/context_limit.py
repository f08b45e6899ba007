"""How many positions a model can serve when rows of different length share a batch."""

from typing import Any

from moeless.errors import ConfigError

_BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")


def context_limit(config: Any) -> int | None:
    """Positions that ``config`` allows; None if it names no limit.

    Longrope and dynamic-NTK embeddings choose their factors by the longest row of the batch, so
    beyond the original context a request's tokens would depend on its neighbours (and on keys
    rotated before the switch). Such models are served up to the original context, where the
    factors never change.

    Args:
        config: A transformers text config.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        original: int | None = rope.get("original_max_position_embeddings")
        return min((bound for bound in (original, limit) if bound is not None), default=None)
    return limit


def resolve_max_model_len(config: Any, asked: int | None, default: int = 4096) -> int:
    """The sequence length to serve.

    Args:
        config: A transformers text config.
        asked: What the operator wants; None takes the model's limit.
        default: Used when neither says anything.

    Raises:
        ConfigError: ``asked`` is not positive, or above what the model can serve.
    """
    limit = context_limit(config)
    if asked is None:
        return limit or default
    if asked < 2:
        raise ConfigError(f"max_model_len is {asked}; it must hold a prompt and a new token")
    if limit is not None and asked > limit:
        raise ConfigError(
            f"max_model_len is {asked}, but this model can be served up to {limit} positions; "
            f"choose {limit} or less"
        )
    return asked
