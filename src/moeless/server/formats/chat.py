"""Answers of ``/v1/chat/completions``."""

from collections.abc import Iterable
from typing import Any

from moeless.core.generation import TokenEvent, TokenLogprob
from moeless.server.encoding import finite_logprob
from moeless.server.formats.base import CollectedChoice, Usage, unix_seconds
from moeless.server.plan import ChoicePlan


class ChatFormat:
    """Writes one conversation's answer.

    Args:
        answer_id: The ``id`` field.
        model: The ``model`` field.
        with_logprobs: The caller asked for log-probabilities.
        with_usage: Chunks carry ``"usage": null`` until the last one has the counts.
    """

    def __init__(
        self, answer_id: str, model: str, *, with_logprobs: bool, with_usage: bool
    ) -> None:
        self._head = {"id": answer_id, "created": unix_seconds(), "model": model}
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._begun: set[int] = set()

    def chunks(self, choice: ChoicePlan, event: TokenEvent) -> list[dict[str, Any]]:
        """The role once, then text, then the reason to end."""
        chunks = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            # Sent with the first token and not before, so that clients time the token.
            chunks.append(self._chunk(choice, {"role": "assistant", "content": ""}))
        logprobs = _logprobs(event.logprobs) if self._with_logprobs else None
        if event.text or (logprobs and logprobs["content"]):
            chunks.append(self._chunk(choice, {"content": event.text}, logprobs=logprobs))
        if event.finish_reason is not None:
            chunks.append(self._chunk(choice, {}, finish_reason=event.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk."""
        return {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage.body(),
        }

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.plan.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": _logprobs(choice.logprobs) if self._with_logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage.body(),
        }

    def _chunk(
        self,
        choice: ChoicePlan,
        delta: dict[str, str],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [
                {
                    "index": choice.index,
                    "delta": delta,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason,
                }
            ],
        }
        if self._with_usage:
            chunk["usage"] = None
        return chunk


def _logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(token.token, token.logprob),
                "top_logprobs": [_token(text, logprob) for _, text, logprob in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A replacement character stands for a part of a character, whose bytes are not known here.
    known = "\ufffd" not in text
    return {
        "token": text,
        "logprob": finite_logprob(logprob),
        "bytes": list(text.encode("utf-8", "replace")) if known else None,
    }
