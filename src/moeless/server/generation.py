"""One HTTP request's sequences, run together in the engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from moeless.core.generation import GenerationStream, TextEngine, TokenEvent
from moeless.errors import MoelessError, UnavailableError
from moeless.server.errors import engine_failed, engine_unavailable, from_engine, unavailable
from moeless.server.limits import Account
from moeless.server.metrics import ServerMetrics
from moeless.server.plan import ChoicePlan, GenerationPlan

OnEvent = Callable[[ChoicePlan, TokenEvent], Awaitable[None]]


class Generation:
    """Submits the sequences of a plan, hands on their events, and leaves none behind.

    Args:
        engine: Where sequences run.
        plan: The sequences.
        metrics: Times and counts tokens.
        account: Whose tokens they are.
        path: Label of the endpoint.
        arrived_s: When the request arrived, on ``time.perf_counter``.
    """

    def __init__(
        self,
        engine: TextEngine,
        plan: GenerationPlan,
        *,
        metrics: ServerMetrics,
        account: Account,
        path: str,
        arrived_s: float,
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._metrics = metrics
        self._account = account
        self._path = path
        self._arrived_s = arrived_s
        self._streams: dict[int, GenerationStream] = {}
        self._tokens: dict[int, int] = {}
        self._outcome = "cancelled"
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
                self._streams[choice.index] = self._engine.submit(choice.request)
        except MoelessError as exc:
            self._outcome = "refused"
            raise from_engine(exc, prompt_param=self.plan.prompt_param) from None
        self._metrics.prompt_tokens.inc(self.plan.prompt_tokens)
        self._account.use_prompt(self.plan.prompt_tokens)

    async def run(self, on_event: OnEvent) -> None:
        """Await ``on_event`` for each event; the events of one choice come in order.

        Raises:
            ApiError: The engine failed, or ended a sequence before its time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.plan.choices:
                    stream = self._streams[choice.index]
                    group.create_task(self._follow(choice, stream, on_event))
        except BaseExceptionGroup as failed:
            self._outcome = "failed"
            raise failed.exceptions[0] from None
        self._outcome = "finished"

    def close(self) -> None:
        """Cancel what still runs; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        for index in self._streams:
            self._engine.cancel(self.plan.choices[index].request.request_id)
        self._metrics.request_duration.labels(self._path, self._outcome).observe(
            time.perf_counter() - self._arrived_s
        )

    async def _follow(
        self, choice: ChoicePlan, stream: GenerationStream, on_event: OnEvent
    ) -> None:
        last_s: float | None = None
        while True:
            event = await _next_event(stream)
            self._count_tokens(choice.index, event)
            if event.token_ids:
                last_s = self._time_token(last_s)
            if event.finish_reason is not None:
                del self._streams[choice.index]
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
            self._metrics.generated_tokens.inc(now - before)
            self._account.use_generated(now - before)

    def _time_token(self, last_s: float | None) -> float:
        now_s = time.perf_counter()
        if last_s is None:
            self._metrics.time_to_first_token.labels(self._path).observe(now_s - self._arrived_s)
        else:
            self._metrics.inter_token_latency.labels(self._path).observe(now_s - last_s)
        return now_s


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
