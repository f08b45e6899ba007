"""Shapes of the answers, for the OpenAPI document.

Answers are written by :mod:`moeless.server.formats`; the tests hold them to these shapes.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """Every field is always there, and there is no other."""

    model_config = ConfigDict(extra="forbid")


class UsageShape(Shape):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Shape):
    """Log-probabilities of a completion's tokens."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(Shape):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Shape):
    """Answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageShape


class TopLogprob(Shape):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Log-probabilities of an answer's tokens."""

    content: list[ChosenLogprob]
    refusal: None


class AssistantMessage(Shape):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Shape):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageShape


class ModelInfo(Shape):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelInfo]


class Health(Shape):
    """The server can answer."""

    status: Literal["ok"]
    running: int
    waiting: int


class ErrorDetail(Shape):
    """Why a request failed."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Shape):
    """What every failed request gets."""

    error: ErrorDetail
