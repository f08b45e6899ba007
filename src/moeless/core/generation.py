"""Text generation as the server sees it: requests in, token events out.

This module must not know any engine, any web framework, or how experts are served.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from moeless.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token.

    Args:
        max_tokens: Number of tokens to generate at the most, at least 1.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Number of candidates; 0 keeps all.
        seed: Makes sampling repeatable; None draws a fresh one.
        stop: Strings that end the text; the text returned does not contain them.
        logprobs: None for none, else the number of alternatives (0 = the chosen token only).
        ignore_eos: Generate ``max_tokens`` whatever comes.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """How to choose the next token where a request does not say: as the model's makers advise.

    Args:
        temperature: See ``SamplingParams``; without advice it is OpenAI's default.
        top_p: See there.
        top_k: See there.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    Args:
        request_id: Unique among the engine's live requests.
        prompt_ids: Token ids, at least one.
        sampling: How to choose tokens.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token under the model (before temperature and filters)."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """What one step produced for one request.

    ``text`` is what may be shown to the reader now (stop strings and unfinished UTF-8 are held
    back), so that joining all ``text`` gives the final answer. The last event of a request has
    ``finish_reason`` set; nothing follows it. ``unavailable`` says of an error that what was
    missing (a device, a healthy engine) may be back in a moment.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    unavailable: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot for health checks and metrics."""

    running: int
    waiting: int
    max_batch_size: int
    max_model_len: int
    healthy: bool
    reason: str | None = None


class GenerationStream(Protocol):
    """The events of one request, in order; ends after the event with a finish reason."""

    def __iter__(self) -> Iterator[TokenEvent]:
        """Block for each next event."""
        ...

    async def next_event(self) -> TokenEvent | None:
        """Await the next event; None after the last."""
        ...


@runtime_checkable
class TextEngine(Protocol):
    """What a server needs of an engine. All methods may be called from any thread."""

    @property
    def model_id(self) -> str:
        """The id under which the model is served."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt plus completion tokens that fit into one sequence."""
        ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """How the model is meant to be sampled from."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text (with the special tokens that the tokenizer adds by itself).

        Raises:
            RequestError: The text cannot be encoded.
        """
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request.

        Raises:
            RequestError: Empty or over-long prompt, or a parameter that cannot be honoured.
            QueueFullError: Too many requests wait.
            EngineError: The engine is down.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request; its stream ends with ``cancelled``. Unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """The current state."""
        ...


def read_content(content: Any) -> str:
    """The text of a chat message: its content itself, or text parts joined by line ends.

    Args:
        content: As JSON has it.

    Raises:
        RequestError: Anything else; the message names the part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError("must be a string or a list of text parts")
    for position, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise RequestError(f"part {position} must be an object with a type")
        if part["type"] != "text":
            raise RequestError(f"part {position} is not of type text: only text is supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise RequestError(f"part {position} must have type and text and nothing else")
    return "\n".join(part["text"] for part in content)
