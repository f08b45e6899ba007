"""Answers on their way to the client: event by event, or whole."""

import asyncio
import contextlib
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeless.core.generation import TokenEvent
from moeless.server.connection import run_while_connected
from moeless.server.encoding import SSE_DONE, JsonResponse, to_sse
from moeless.server.errors import ApiError, ClientGoneError, internal_error
from moeless.server.formats.base import AnswerFormat, CollectedChoice, Usage
from moeless.server.generation import Generation
from moeless.server.plan import ChoicePlan

# A client that does not read cannot hold up a shutdown longer than this.
_LAST_WORDS_S = 1.0


class AnswerResponse(Response):
    """Runs a generation while its client listens.

    The sequences are queued when the response is sent, so that whatever happens before or
    after, one ``finally`` cancels them.

    Args:
        generation: What to run.
        answer_format: How to write it.
        cut: Set when the server wants open requests to end.
        timeout_s: Longest time for the answer.
    """

    def __init__(
        self,
        generation: Generation,
        answer_format: AnswerFormat,
        *,
        cut: asyncio.Event,
        timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._format = answer_format
        self._cut = cut
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; an error before the first byte is raised for the error handlers."""
        try:
            self._generation.submit()
            await self._answer(scope, receive, send)
        finally:
            self._generation.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._generation.plan.prompt_tokens,
            completion_tokens=self._generation.completion_tokens,
        )


class WholeAnswerResponse(AnswerResponse):
    """The answer as one JSON object."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [CollectedChoice(plan=plan) for plan in self._generation.plan.choices]

        async def collect(plan: ChoicePlan, event: TokenEvent) -> None:
            choices[plan.index].add(event)

        await run_while_connected(
            self._generation.run(collect),
            receive=receive,
            cut=self._cut,
            timeout_s=self._timeout_s,
        )
        answer = self._format.answer(choices, self._usage())
        await JsonResponse(answer)(scope, receive, send)


class EventStreamResponse(AnswerResponse):
    """The answer as server-sent events, closed by ``[DONE]`` whatever happens.

    Args:
        with_usage: Send the token counts before ``[DONE]``.
        **kwargs: See :class:`AnswerResponse`.
    """

    media_type = "text/event-stream"

    def __init__(self, *args: Any, with_usage: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_usage = with_usage

    async def _answer(self, _: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last_words = SSE_DONE
        try:
            await run_while_connected(
                self._send_events(send),
                receive=receive,
                cut=self._cut,
                timeout_s=self._timeout_s,
            )
        except ClientGoneError:
            return
        except ApiError as error:
            last_words = to_sse(error.body()) + SSE_DONE
        except Exception as exc:  # noqa: BLE001 - the status is sent; only the stream can tell
            last_words = to_sse(internal_error(exc).body()) + SSE_DONE
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await send({"type": "http.response.body", "body": last_words})

    async def _send_events(self, send: Send) -> None:
        # Several choices write to one connection.
        turn = asyncio.Lock()

        async def send_event(plan: ChoicePlan, event: TokenEvent) -> None:
            chunks = self._format.chunks(plan, event)
            if chunks:
                async with turn:
                    await _send_body(send, b"".join(map(to_sse, chunks)))

        await self._generation.run(send_event)
        if self._with_usage:
            await _send_body(send, to_sse(self._format.usage_chunk(self._usage())))


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
