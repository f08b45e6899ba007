"""Limits and keys of the HTTP server."""

import math
import re
from dataclasses import dataclass, field

from moeless.errors import ConfigError
from moeless.server.keys import ApiKey, KeyRing
from moeless.server.limits import KeyLimits

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the server accepts, and how much of it at once.

    Args:
        api_keys: Keys of which one must come as ``Authorization: Bearer KEY``; empty = open.
        key_limits: What each key may use that has no limits of its own; without keys, what all
            clients together may use.
        allow_origins: Sites whose pages may send requests, such as ``https://chat.example``;
            pages of other sites are refused.
        local_names_only: Refuse requests that were sent to another name than localhost or an
            address: a web page can give its own name our address, and read the answers.
        max_connections: Open connections; when there are more, those that wait longest for their
            clients are closed.
        max_headers: Header fields of one request.
        max_head_bytes: Bytes of one request's headers.
        head_timeout_s: How long a client may take from connecting, or from its last answer, to
            the end of its request's headers.
        max_body_bytes: Longest request body.
        body_timeout_s: How long a client may take to send its body.
        request_timeout_s: How long one request may take in all.
        drain_s: On shutdown, how long open requests may go on before they are cut.
        max_concurrent: Generation requests in progress; more get a 429.
        max_sequences: Prompts × n of one request.
        max_n: Choices per prompt.
        max_stop: Stop strings of one request (OpenAI's limit is 4).
        max_logprobs: Alternatives per token (OpenAI's limit is 20).
        advised_sampling: Whether requests that do not say how to sample get what the model's
            generation config advises; otherwise OpenAI's defaults.
        tokenizer_threads: Threads that encode and decode; the event loop never does.
        max_chars_per_token: A prompt of more characters than this × the engine's
            ``max_model_len`` is refused unread. The longest token of the common vocabularies
            is a run of 128 blanks, so no prompt that fits is refused.

    Raises:
        ConfigError: A limit that is not positive, two keys that are the same, or no origin.
    """

    api_keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    allow_origins: tuple[str, ...] = ()
    local_names_only: bool = False
    max_connections: int = 2048
    max_headers: int = 100
    max_head_bytes: int = 16 * 1024
    head_timeout_s: float = 10.0
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    drain_s: float = 1.0
    max_concurrent: int = 1024
    max_sequences: int = 128
    max_n: int = 16
    max_stop: int = 4
    max_logprobs: int = 20
    advised_sampling: bool = True
    tokenizer_threads: int = 2
    max_chars_per_token: int = 128

    def __post_init__(self) -> None:
        KeyRing(self.api_keys)
        for origin in self.allow_origins:
            _check_origin(origin)
        for name in (
            "max_connections",
            "max_headers",
            "max_head_bytes",
            "head_timeout_s",
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


def _check_origin(origin: str) -> None:
    if not _ORIGIN.fullmatch(origin.lower()):
        raise ConfigError(
            f"{origin!r} is not an origin: give scheme, host and, if need be, port of one site, "
            f"such as https://chat.example or http://localhost:3000"
        )
