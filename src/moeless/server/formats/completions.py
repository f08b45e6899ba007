"""Answers of ``/v1/completions``."""

from collections.abc import Iterable
from typing import Any

from moeless.core.generation import TokenEvent, TokenLogprob
from moeless.server.encoding import finite_logprob
from moeless.server.formats.base import CollectedChoice, Usage, unix_seconds
from moeless.server.plan import ChoicePlan


class CompletionFormat:
    """Writes the completions of one request.

    Args:
        answer_id: The ``id`` field.
        model: The ``model`` field.
        logprobs: Number of alternatives that the caller asked for; None = no log-probabilities.
        with_usage: Chunks carry ``"usage": null`` until the last one has the counts.
    """

    def __init__(
        self, answer_id: str, model: str, *, logprobs: int | None, with_usage: bool
    ) -> None:
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": unix_seconds(),
            "model": model,
        }
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._offsets: dict[int, int] = {}

    def chunks(self, choice: ChoicePlan, event: TokenEvent) -> list[dict[str, Any]]:
        """One chunk, or none while the engine holds the text back."""
        first = choice.index not in self._offsets
        offset = self._offsets.setdefault(choice.index, 0)
        text = choice.echo + event.text if first else event.text
        logprobs = self._write_logprobs(event.logprobs, offset)
        self._offsets[choice.index] += sum(len(token.token) for token in event.logprobs)
        if not text and event.finish_reason is None and not event.logprobs:
            return []
        chunk: dict[str, Any] = {
            **self._head,
            "choices": [_choice(choice.index, text, logprobs, event.finish_reason)],
        }
        if self._with_usage:
            chunk["usage"] = None
        return [chunk]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk."""
        return {**self._head, "choices": [], "usage": usage.body()}

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "choices": [
                _choice(
                    choice.plan.index,
                    choice.plan.echo + choice.text,
                    self._write_logprobs(choice.logprobs, 0),
                    choice.finish_reason,
                )
                for choice in choices
            ],
            "usage": usage.body(),
        }

    def _write_logprobs(
        self, tokens: Iterable[TokenLogprob], offset: int
    ) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        written: dict[str, Any] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [] if self._logprobs else None,
        }
        for token in tokens:
            written["text_offset"].append(offset)
            written["token_logprobs"].append(finite_logprob(token.logprob))
            written["tokens"].append(token.token)
            if self._logprobs:
                top = {text: finite_logprob(logprob) for _, text, logprob in token.top}
                top.setdefault(token.token, finite_logprob(token.logprob))
                written["top_logprobs"].append(top)
            offset += len(token.token)
        return written


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
