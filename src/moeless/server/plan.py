"""What one HTTP request asks of the engine."""

import hashlib
from dataclasses import dataclass, replace

from moeless.core.generation import GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ChoicePlan:
    """One choice of the answer = one sequence of the engine.

    Args:
        index: Position in the answer's ``choices``.
        request: What the engine is given.
        echo: Text to put before the completion.
    """

    index: int
    request: GenerationRequest
    echo: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """All sequences of one HTTP request.

    Args:
        answer_id: The ``id`` of the answer.
        choices: Ordered by index: all choices of the first prompt, then of the second…
        prompt_tokens: Tokens of the prompts, each counted once however large n is.
        prompt_param: How the endpoint calls its prompt, for error messages.
    """

    answer_id: str
    choices: tuple[ChoicePlan, ...]
    prompt_tokens: int
    prompt_param: str


def plan_choices(
    answer_id: str,
    prompts: list[tuple[tuple[int, ...], SamplingParams, str]],
    *,
    n: int,
    prompt_param: str,
) -> GenerationPlan:
    """Number the choices and give each its own seed.

    Args:
        answer_id: Prefix of the engine's request ids.
        prompts: Token ids, sampling and echo of each prompt.
        n: Choices per prompt.
        prompt_param: How the endpoint calls its prompt.
    """
    choices = [
        ChoicePlan(
            index=position * n + choice,
            request=GenerationRequest(
                request_id=f"{answer_id}-{position * n + choice}",
                prompt_ids=ids,
                sampling=replace(sampling, seed=derive_seed(sampling.seed, choice)),
            ),
            echo=echo,
        )
        for position, (ids, sampling, echo) in enumerate(prompts)
        for choice in range(n)
    ]
    return GenerationPlan(
        answer_id=answer_id,
        choices=tuple(choices),
        prompt_tokens=sum(len(ids) for ids, _, _ in prompts),
        prompt_param=prompt_param,
    )


def derive_seed(seed: int | None, choice: int) -> int | None:
    """Seed of one of n choices: the first keeps the caller's, so n = 1 is its special case."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
