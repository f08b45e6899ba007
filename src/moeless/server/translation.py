"""From validated bodies to plans: names, defaults and limits of the API."""

import json
import uuid

from moeless.core.generation import SamplingDefaults, SamplingParams, TextEngine
from moeless.server.errors import ApiError, context_exceeded
from moeless.server.plan import GenerationPlan, plan_choices
from moeless.server.schemas.chat import ChatBody
from moeless.server.schemas.completions import CompletionBody
from moeless.server.schemas.generation import GenerationBody
from moeless.server.settings import ServerSettings
from moeless.server.tokenizing import TokenizerPool

_DEFAULT_COMPLETION_TOKENS = 16


class RequestTranslator:
    """Turns bodies into plans for one served model.

    Args:
        engine: Serves the only model there is.
        tokenizer: Encodes off the event loop.
        settings: Limits.
    """

    def __init__(
        self, engine: TextEngine, tokenizer: TokenizerPool, settings: ServerSettings
    ) -> None:
        self._model_id = engine.model_id
        self._max_model_len = engine.max_model_len
        advised = settings.advised_sampling
        self._defaults = engine.sampling_defaults if advised else SamplingDefaults()
        self._tokenizer = tokenizer
        self._settings = settings

    async def plan_chat(self, body: ChatBody) -> GenerationPlan:
        """Plan ``/v1/chat/completions``.

        Raises:
            ApiError: A field that cannot be honoured.
        """
        self._check_shared(body, prompts=1)
        _refuse_tools(body)
        max_tokens, param = _chat_budget(body)
        logprobs = self._chat_logprobs(body)
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
            }
            # Who speaks, for templates that tell participants apart; others make nothing of it.
            | ({} if message.name is None else {"name": message.name})
            for message in body.messages
        ]
        ids = await self._tokenizer.encode_chat(messages)
        room = self._room(len(ids), max_tokens, param=param, prompt_param="messages")
        sampling = self._sampling(body, max_tokens=max_tokens or room, logprobs=logprobs)
        return plan_choices(
            f"chatcmpl-{uuid.uuid4().hex}",
            [(ids, sampling, "")],
            n=body.choices,
            prompt_param="messages",
        )

    async def plan_completion(self, body: CompletionBody) -> GenerationPlan:
        """Plan ``/v1/completions``.

        Raises:
            ApiError: A field that cannot be honoured.
        """
        self._check_shared(body, prompts=len(body.prompt))
        self._check_logprobs(body.logprobs, "logprobs")
        if body.best_of not in {None, body.choices}:
            raise ApiError(
                f"best_of {body.best_of} is not supported: leave it out",
                param="best_of",
                code="unsupported_value",
            )
        if body.echo and body.logprobs is not None:
            raise ApiError(
                "echo cannot be combined with logprobs: the prompt's are not computed",
                param="echo",
                code="unsupported_value",
            )
        prompts = []
        for prompt in body.prompt:
            ids = await self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            room = self._room(len(ids), body.max_tokens, param="max_tokens", prompt_param="prompt")
            max_tokens = body.max_tokens or min(_DEFAULT_COMPLETION_TOKENS, room)
            echo = ""
            if body.echo:
                echo = prompt if isinstance(prompt, str) else await self._tokenizer.decode(prompt)
            sampling = self._sampling(body, max_tokens=max_tokens, logprobs=body.logprobs)
            prompts.append((ids, sampling, echo))
        return plan_choices(
            f"cmpl-{uuid.uuid4().hex}", prompts, n=body.choices, prompt_param="prompt"
        )

    def check_model(self, model: str) -> None:
        """Refuse any model but the one that is served.

        Raises:
            ApiError: 404.
        """
        if model != self._model_id:
            raise ApiError(
                f"the model {json.dumps(model[:200])} does not exist: this server has "
                f"{json.dumps(self._model_id)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _check_shared(self, body: GenerationBody, *, prompts: int) -> None:
        self.check_model(body.model)
        limits = self._settings
        _check_at_most("n", body.choices, limits.max_n)
        _check_at_most("number of stop strings", len(body.stop), limits.max_stop, param="stop")
        _check_at_most(
            "number of prompts × n", prompts * body.choices, limits.max_sequences, param="prompt"
        )
        if body.stream_options is not None and not body.stream:
            raise ApiError(
                "stream_options needs stream: set stream to true",
                param="stream_options",
                code="invalid_value",
            )

    def _sampling(
        self, body: GenerationBody, *, max_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        defaults = self._defaults
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
            seed=body.seed,
            stop=body.stop,
            logprobs=logprobs,
            ignore_eos=bool(body.ignore_eos),
        )

    def _check_logprobs(self, logprobs: int | None, param: str) -> None:
        _check_at_most(param, logprobs or 0, self._settings.max_logprobs)

    def _chat_logprobs(self, body: ChatBody) -> int | None:
        if body.logprobs:
            self._check_logprobs(body.top_logprobs, "top_logprobs")
            return body.top_logprobs or 0
        if body.top_logprobs:
            raise ApiError(
                "top_logprobs needs logprobs: set logprobs to true",
                param="top_logprobs",
                code="invalid_value",
            )
        return None

    def _room(
        self, prompt_tokens: int, max_tokens: int | None, *, param: str, prompt_param: str
    ) -> int:
        """Tokens left for the completion, at least 1."""
        limit = self._max_model_len
        if prompt_tokens == 0:
            raise ApiError(
                "the prompt is empty: give at least one token",
                param=prompt_param,
                code="empty_prompt",
            )
        room = limit - prompt_tokens
        if room < 1:
            raise context_exceeded(
                f"the prompt of {prompt_tokens} tokens leaves no room in the model's {limit} "
                "tokens: shorten it",
                param=prompt_param,
            )
        if max_tokens is not None and max_tokens > room:
            raise context_exceeded(
                f"the prompt of {prompt_tokens} tokens and {param} {max_tokens} exceed the "
                f"model's {limit} tokens: ask for at most {room}",
                param=param,
            )
        return room


def _check_at_most(what: str, value: int, limit: int, *, param: str | None = None) -> None:
    if value > limit:
        raise ApiError(
            f"{what} is {value}: the limit is {limit}", param=param or what, code="invalid_value"
        )


def _refuse_tools(body: ChatBody) -> None:
    """Tools may be named where none is to be called."""
    for field, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if getattr(body, field) and getattr(body, choice) != "none":
            raise ApiError(
                f'{field} cannot be called here: leave the field out, or send {choice} "none"',
                param=field,
                code="unsupported_value",
            )


def _chat_budget(body: ChatBody) -> tuple[int | None, str]:
    """The completion's token limit and the field that it came from."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise ApiError(
            f"max_completion_tokens {new} and max_tokens {old} differ: give one of them",
            param="max_tokens",
            code="invalid_value",
        )
    if new is not None:
        return new, "max_completion_tokens"
    return old, "max_tokens"
