"""Encoding and decoding off the event loop, on a bounded number of threads."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moeless.core.generation import TextEngine
from moeless.errors import EngineError
from moeless.server.errors import context_exceeded, from_engine
from moeless.server.settings import ServerSettings

ResultT = TypeVar("ResultT")


class TokenizerPool:
    """The engine's tokenizer for coroutines.

    Args:
        engine: Owner of the tokenizer.
        settings: Thread count and the length from which a text is refused unread.
    """

    def __init__(self, engine: TextEngine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._pool = ThreadPoolExecutor(
            settings.tokenizer_threads, thread_name_prefix="moeless-tokenizer"
        )

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            ApiError: Too long, or refused by the engine.
        """
        self._check_length(len(text), "prompt")
        return tuple(await self._run(lambda: self._engine.encode(text), "prompt"))

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation.

        Raises:
            ApiError: Too long, or refused by the model's template.
        """
        length = sum(len(text) for message in messages for text in message.values())
        self._check_length(length, "messages")
        return tuple(await self._run(lambda: self._engine.encode_chat(messages), "messages"))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a prompt that came as token ids.

        Raises:
            ApiError: The engine refuses the ids.
        """
        return await self._run(lambda: self._engine.decode(token_ids), "prompt")

    def close(self) -> None:
        """Take no more work and drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, characters: int, param: str) -> None:
        limit = self._engine.max_model_len * self._settings.max_chars_per_token
        if characters > limit:
            raise context_exceeded(
                f"the {param} of {characters} characters cannot fit into the model's "
                f"{self._engine.max_model_len} tokens: shorten it",
                param=param,
            )

    async def _run(self, work: Callable[[], ResultT], param: str) -> ResultT:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except EngineError as exc:
            raise from_engine(exc, prompt_param=param) from None
