"""A text engine without a model: answers depend on the prompt and the seed alone.

One token is one character, so that every count in a test can be read off its strings.
"""

import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moeless.core.generation import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    SamplingDefaults,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from moeless.errors import EngineError, QueueFullError, RequestError

# A line end, a blank and characters of two, three and four bytes come up in answers.
_ALPHABET = "abcdefghijk\n é→🙂"
_POLL_S = 0.002


class FakeStream:
    """Events of one request, made when they are asked for."""

    def __init__(self, engine: "FakeTextEngine", request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request
        self._events = self._produce()

    def __iter__(self) -> Iterator[TokenEvent]:
        while True:
            while self._stalls():
                time.sleep(_POLL_S)
            event = next(self._events, None)
            if event is None:
                return
            yield event

    async def next_event(self) -> TokenEvent | None:
        if self._engine.step_s:
            await asyncio.sleep(self._engine.step_s)
        while self._stalls():
            await asyncio.sleep(_POLL_S)
        return next(self._events, None)

    def _stalls(self) -> bool:
        live = self._engine.is_live(self._request.request_id)
        return live and self._sent >= self._engine.stall_after

    _sent = 0

    def _produce(self) -> Iterator[TokenEvent]:
        engine, request = self._engine, self._request
        text, reason = engine.answer_to(request)
        for position, character in enumerate(text):
            if not engine.is_live(request.request_id):
                yield self._event("", "cancelled")
                return
            if engine.fail_after is not None and position >= engine.fail_after:
                engine.finish(request.request_id)
                if engine.fail_with is not None:
                    raise engine.fail_with
                yield replace(self._event("", "error"), unavailable=engine.fails_unavailable)
                return
            self._sent = position + 1
            yield self._event(character, None)
        engine.finish(request.request_id)
        yield self._event("", reason)

    def _event(self, text: str, reason: FinishReason | None) -> TokenEvent:
        logprobs: tuple[TokenLogprob, ...] = ()
        wanted = self._request.sampling.logprobs
        if wanted is not None and text:
            top = tuple((ord(c), c, -0.5 - i) for i, c in enumerate(_ALPHABET[:wanted]))
            logprobs = (
                TokenLogprob(token_id=ord(text), token=text, logprob=float("-inf"), top=top),
            )
        return TokenEvent(
            request_id=self._request.request_id,
            token_ids=tuple(map(ord, text)),
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            error=self._engine.fails_with_reason if reason == "error" else None,
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self._sent,
        )


class FakeTextEngine:
    """Implements the port; its attributes make it slow, full, broken or down.

    Attributes:
        step_s: Time per token.
        stall_after: Tokens after which every stream waits until it is cancelled.
        fail_after: Tokens after which every stream fails.
        fail_with: What a failing stream raises; None = it ends with an error event.
        fails_with_reason: What that event says.
        fails_unavailable: Whether it says that it may help to try again.
        queue_limit: Live requests after which ``submit`` refuses.
        down: Why ``submit`` refuses everything.
        natural_tokens: Length of an answer that ends by itself.
        encode_gate: ``encode`` waits for it.
        encoding: Calls of ``encode`` that have begun and not ended.
    """

    model_id = "fake/model"

    def __init__(
        self, *, max_model_len: int = 256, defaults: SamplingDefaults | None = None
    ) -> None:
        self.max_model_len = max_model_len
        self.sampling_defaults = defaults or SamplingDefaults()
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self._live: set[str] = set()
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Be well and fast again, and forget what happened."""
        self.step_s = 0.0
        self.stall_after: float = float("inf")
        self.fail_after: int | None = None
        self.fail_with: Exception | None = None
        self.fails_with_reason = "a device is lost"
        self.fails_unavailable = False
        self.queue_limit: int | None = None
        self.down: str | None = None
        self.natural_tokens = 24
        self.encode_gate = threading.Event()
        self.encode_gate.set()
        self.encoding = 0
        self.submitted.clear()
        self.cancelled.clear()

    def encode(self, text: str) -> list[int]:
        self.encoding += 1
        try:
            self.encode_gate.wait()
        finally:
            self.encoding -= 1
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise RequestError("the conversation must not end with the assistant's turn")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def submit(self, request: GenerationRequest) -> FakeStream:
        if self.down is not None:
            raise EngineError(self.down)
        if not request.prompt_ids or len(request.prompt_ids) >= self.max_model_len:
            raise RequestError("the prompt is empty or too long", param="prompt_ids")
        if any(token > sys.maxunicode for token in request.prompt_ids):
            raise RequestError("a token id is not in the vocabulary", param="prompt_ids")
        with self._lock:
            if self.queue_limit is not None and len(self._live) >= self.queue_limit:
                raise QueueFullError("the queue is full", retry_after_s=1.5)
            if request.request_id in self._live:
                raise RequestError(f"request id {request.request_id} is taken")
            self._live.add(request.request_id)
            self.submitted.append(request)
        return FakeStream(self, request)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            self._live.discard(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._live),
            waiting=0,
            max_batch_size=512,
            max_model_len=self.max_model_len,
            healthy=self.down is None,
            reason=self.down,
        )

    def is_live(self, request_id: str) -> bool:
        """Whether the request was neither finished nor cancelled."""
        return request_id in self._live

    def finish(self, request_id: str) -> None:
        """Forget a request that ended by itself."""
        with self._lock:
            self._live.discard(request_id)

    def answer_to_prompt(self, prompt: str, **sampling) -> str:
        """The greedy text that continues a prompt of characters."""
        request = GenerationRequest(
            request_id="",
            prompt_ids=tuple(self.encode(prompt)),
            sampling=SamplingParams(**sampling),
        )
        return self.answer_to(request)[0]

    def answer_to(self, request: GenerationRequest) -> tuple[str, FinishReason]:
        """The text that a request gets, and why it ends."""
        sampling = request.sampling
        seed = sampling.seed if sampling.temperature > 0 else None
        length = sampling.max_tokens
        reason: FinishReason = "length"
        if not sampling.ignore_eos and self.natural_tokens <= length:
            length, reason = self.natural_tokens, "stop"
        key = f"{request.prompt_ids}{seed}".encode()
        noise = hashlib.shake_128(key).digest(length)
        text = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in noise)
        ends = [text.find(stop) for stop in sampling.stop if stop in text]
        return (text[: min(ends)], "stop") if ends else (text, reason)
