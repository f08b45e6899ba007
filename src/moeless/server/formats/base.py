"""What a format must offer, and the parts that both endpoints share."""

import datetime
from dataclasses import dataclass, field
from typing import Any, Protocol

from moeless.core.generation import FinishReason, TokenEvent, TokenLogprob
from moeless.server.plan import ChoicePlan


@dataclass(kw_only=True)
class CollectedChoice:
    """One choice, gathered from its events.

    Args:
        plan: Which choice.
    """

    plan: ChoicePlan
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        """Take in the next event."""
        self.texts.append(event.text)
        self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason

    @property
    def text(self) -> str:
        """The completion so far."""
        return "".join(self.texts)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class AnswerFormat(Protocol):
    """How one endpoint writes its answer. An object serves one request."""

    def chunks(self, choice: ChoicePlan, event: TokenEvent) -> list[dict[str, Any]]:
        """Chunks that tell of one event; may be none."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk: no choice, only token counts."""
        ...

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> dict[str, Any]:
        """The answer as one object."""
        ...


def unix_seconds() -> int:
    """Now, for the ``created`` field."""
    return int(datetime.datetime.now(tz=datetime.UTC).timestamp())
