"""One HTTP request's sequences, run together in the engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from moeless.core.generation import GenerationStream, TextEngine, TokenEvent
from moeless.errors import MoelessError, UnavailableError
from moeless.server.errors import (
    ApiError,
    engine_failed,
    engine_unavailable,
    from_engine,
    unavailable,
)
from moeless.server.limits import Account
from moeless.server.metrics import ServerMetrics
from moeless.server.plan import ChoicePlan, GenerationPlan
from moeless.server.readiness import Readiness
from moeless.server.record import RequestRecord

OnEvent = Callable[[ChoicePlan, TokenEvent], Awaitable[None]]


class Generation:
    """Submits the sequences of a plan, hands on their events, and leaves none behind.

    Args:
        engine: Where sequences run.
        plan: The sequences.
        metrics: Times and counts tokens.
        account: Whose tokens they are.
        record: Of the request.
        readiness: Told what becomes of it.
    """

    def __init__(
        self,
        engine: TextEngine,
        plan: GenerationPlan,
        *,
        metrics: ServerMetrics,
        account: Account,
        record: RequestRecord,
        readiness: Readiness,
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._metrics = metrics
        self._account = account
        self._record = record
        self._readiness = readiness
        self._record.answer_id = plan.answer_id
        self._streams: dict[int, GenerationStream] = {}
        self._tokens: dict[int, int] = {}
        self._first_s: dict[int, float] = {}
        self._record.outcome = "cancelled"
        self._closed = False

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(self._tokens.values())

    def submit(self) -> None:
        """Queue all sequences; on an error, those queued before it end with :meth:`close`.

        Raises:
            ApiError: The engine refuses one of them.
        """
        try:
            for choice in self.plan.choices:
                if self._record.trace is not None:
                    self._record.trace.follow(choice.request.request_id)
                self._streams[choice.index] = self._engine.submit(choice.request)
        except MoelessError as exc:
            self._record.outcome = "refused"
            raise from_engine(exc, prompt_param=self.plan.prompt_param) from None
        self._metrics.count_prompt(self.plan.prompt_tokens)
        self._account.use_prompt(self.plan.prompt_tokens)
        self._record.prompt_tokens = self.plan.prompt_tokens

    async def run(self, on_event: OnEvent) -> None:
        """Await ``on_event`` for each event; the events of one choice come in order.

        Raises:
            ApiError: The engine failed, or ended a sequence before its time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.plan.choices:
                    stream = self._streams[choice.index]
                    group.create_task(self._try_to_follow(choice, stream, on_event))
        except BaseExceptionGroup as failed:
            self._record.outcome = "failed"
            raise failed.exceptions[0] from None
        self._record.outcome = "finished"
        self._readiness.note_served()

    def close(self) -> None:
        """Cancel what still runs; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        for index in self._streams:
            self._engine.cancel(self.plan.choices[index].request.request_id)
        record = self._record
        record.generated_tokens = self.completion_tokens
        outcome = record.outcome or "cancelled"
        self._metrics.time_request(record.path, outcome, time.perf_counter() - record.arrived_s)

    async def _try_to_follow(
        self, choice: ChoicePlan, stream: GenerationStream, on_event: OnEvent
    ) -> None:
        try:
            await self._follow(choice, stream, on_event)
        except ApiError as error:
            if error.code == "engine_unavailable":
                self._readiness.note_unavailable(
                    choice.request,
                    arrived_s=self._record.arrived_s,
                    tokens=self._tokens.get(choice.index, 0),
                    reason=str(error),
                )
            raise

    async def _follow(
        self, choice: ChoicePlan, stream: GenerationStream, on_event: OnEvent
    ) -> None:
        last_s: float | None = None
        while True:
            event = await _next_event(stream)
            self._count_tokens(choice.index, event)
            if event.token_ids:
                last_s = self._time_token(choice, last_s)
            if event.finish_reason is not None:
                del self._streams[choice.index]
                self._time_choice(choice, last_s)
            _raise_if_failed(event)
            await on_event(choice, event)
            if event.finish_reason is not None:
                return

    def _count_tokens(self, index: int, event: TokenEvent) -> None:
        before = self._tokens.get(index, 0)
        now = max(before + len(event.token_ids), event.completion_tokens)
        self._tokens[index] = now
        if now > before:
            # At once, not at the end: a crash must not lose what long answers have used.
            self._metrics.count_generated(now - before)
            self._account.use_generated(now - before)

    def _time_token(self, choice: ChoicePlan, last_s: float | None) -> float:
        now_s, record = time.perf_counter(), self._record
        if last_s is None:
            self._first_s[choice.index] = now_s
            record.first_token_s = record.first_token_s or now_s
            self._metrics.time_first_token(record.path, now_s - record.arrived_s)
            if record.trace is not None:
                record.trace.first_token(choice.request.request_id)
        else:
            self._metrics.inter_token_latency.labels(record.path).observe(now_s - last_s)
        return now_s

    def _time_choice(self, choice: ChoicePlan, last_s: float | None) -> None:
        """A choice has ended."""
        tokens = self._tokens.get(choice.index, 0)
        if last_s is not None and tokens > 1:
            each_s = (last_s - self._first_s[choice.index]) / (tokens - 1)
            self._metrics.time_output_token(self._record.path, each_s)
        if self._record.trace is not None:
            self._record.trace.end_sequence(choice.request.request_id, tokens=tokens)


async def _next_event(stream: GenerationStream) -> TokenEvent:
    try:
        event = await stream.next_event()
    except UnavailableError as exc:
        raise engine_unavailable(f"the engine is not available: {exc}") from None
    except MoelessError as exc:
        raise engine_failed(f"the engine failed: {exc}") from None
    if event is None:
        raise engine_failed("the engine ended the sequence without a reason")
    return event


def _raise_if_failed(event: TokenEvent) -> None:
    if event.finish_reason == "error" and event.unavailable:
        raise engine_unavailable(f"the engine is not available: {event.error}")
    if event.finish_reason == "error":
        raise engine_failed(f"the engine failed: {event.error or 'no reason given'}")
    if event.finish_reason == "cancelled":
        raise unavailable("the engine cancelled the request", code="cancelled")
