"""Refuse requests that cannot be honoured, before they are queued."""

import math

from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.errors import RequestError


def validate_request(request: GenerationRequest, *, max_model_len: int, vocabulary: int) -> None:
    """Check a request against the model.

    Args:
        request: What is asked for.
        max_model_len: Tokens of prompt and completion that fit.
        vocabulary: Number of token ids.

    Raises:
        RequestError: Something cannot be honoured; the message has the value and the limit.
    """
    prompt_tokens = len(request.prompt_ids)
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    _validate_sampling(request.sampling, vocabulary)
    asked = prompt_tokens + request.sampling.max_tokens
    if asked > max_model_len:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and max_tokens is "
            f"{request.sampling.max_tokens}, together {asked}, but this model serves "
            f"{max_model_len} tokens; shorten the prompt or lower max_tokens",
            param="max_tokens" if prompt_tokens < max_model_len else "prompt",
            code="context_length_exceeded",
        )
    for index, token_id in enumerate(request.prompt_ids):
        if not isinstance(token_id, int) or not 0 <= token_id < vocabulary:
            raise RequestError(
                f"prompt token {index} is {token_id!r}; ids go from 0 to {vocabulary - 1}",
                param="prompt",
                code="invalid_token_id",
            )


def _validate_sampling(params: SamplingParams, vocabulary: int) -> None:
    _require_integer("max_tokens", params.max_tokens, 1)
    _require_integer("top_k", params.top_k, 0)
    if params.seed is not None:
        _require_integer("seed", params.seed, None)
    if params.logprobs is not None:
        _require_integer("logprobs", params.logprobs, 0, vocabulary)
    if not _is_finite(params.temperature) or params.temperature < 0:
        raise RequestError(
            f"temperature is {params.temperature!r}; it must be finite and at least 0",
            param="temperature",
        )
    if not _is_finite(params.top_p) or not 0 < params.top_p <= 1:
        raise RequestError(
            f"top_p is {params.top_p!r}; it must be above 0 and at most 1", param="top_p"
        )
    for stop in params.stop:
        if not isinstance(stop, str) or not stop:
            raise RequestError("stop strings must not be empty; leave them out", param="stop")


def _require_integer(name: str, value: object, least: int | None, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be a whole number", param=name)
    if least is not None and value < least:
        raise RequestError(f"{name} is {value}; it must be at least {least}", param=name)
    if most is not None and value > most:
        raise RequestError(f"{name} is {value}; it must be at most {most}", param=name)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
