"""Limits and keys of the HTTP server."""

import math
from dataclasses import dataclass, field

from moeless.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the server accepts, and how much of it at once.

    Args:
        api_keys: Keys of which one must come as ``Authorization: Bearer KEY``; empty = open.
        max_body_bytes: Longest request body.
        body_timeout_s: How long a client may take to send its body.
        request_timeout_s: How long one request may take in all.
        drain_s: On shutdown, how long open requests may go on before they are cut.
        max_concurrent: Generation requests in progress; more get a 429.
        max_sequences: Prompts × n of one request.
        max_n: Choices per prompt.
        max_stop: Stop strings of one request (OpenAI's limit is 4).
        max_logprobs: Alternatives per token (OpenAI's limit is 20).
        tokenizer_threads: Threads that encode and decode; the event loop never does.
        max_chars_per_token: A prompt of more characters than this × the engine's
            ``max_model_len`` is refused unread. The longest token of the common vocabularies
            is a run of 128 blanks, so no prompt that fits is refused.

    Raises:
        ConfigError: A limit that is not positive, or an empty key.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    drain_s: float = 1.0
    max_concurrent: int = 1024
    max_sequences: int = 128
    max_n: int = 16
    max_stop: int = 4
    max_logprobs: int = 20
    tokenizer_threads: int = 2
    max_chars_per_token: int = 128

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty: give at least one character, or no key")
        for name in (
            "max_body_bytes",
            "body_timeout_s",
            "request_timeout_s",
            "max_concurrent",
            "max_sequences",
            "max_n",
            "max_stop",
            "tokenizer_threads",
            "max_chars_per_token",
        ):
            self._require(name, getattr(self, name) > 0, "more than 0")
        self._require("drain_s", 0 <= self.drain_s < math.inf, "0 or more seconds")
        self._require("max_logprobs", self.max_logprobs >= 0, "0 or more")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)}: it must be {wanted}")
