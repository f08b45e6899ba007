"""Whether it is worth sending requests here, judged by what became of the last ones.

An engine can be well and yet serve nobody: its checkpoint is gone, or the devices that it needs.
Requests are tried all the same; ``/health`` says that they should go elsewhere, until one works.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import replace

from moeless.core.generation import GenerationRequest, TextEngine
from moeless.errors import MoelessError

_log = logging.getLogger(__name__)

_FAILURES_ALLOWED = 3
_MOST_PROBED_TOKENS = 64


class Readiness:
    """Counts requests that could not be served, and tries the last of them again.

    What fails at the same time has one cause: a failure counts if its request came after the
    failure before it. Only the event loop calls it.

    Args:
        engine: Serves.
        first_retry_s: Pause before the request that failed last is tried; later pauses double.
        longest_retry_s: Longest pause.
    """

    def __init__(
        self, engine: TextEngine, *, first_retry_s: float = 1.0, longest_retry_s: float = 15.0
    ) -> None:
        self._engine = engine
        self._first_retry_s, self._longest_retry_s = first_retry_s, longest_retry_s
        self._failures = 0
        self._last_failure_s = float("-inf")
        self._suspect: GenerationRequest | None = None
        self._last_reason = ""
        self._probing: asyncio.Task[None] | None = None

    @property
    def reason(self) -> str | None:
        """Why requests should go elsewhere; None if they should not."""
        if self._failures < _FAILURES_ALLOWED:
            return None
        return f"the last {self._failures} requests could not be served: {self._last_reason}"

    def note_served(self) -> None:
        """A request has been answered."""
        if self.reason is not None:
            _log.warning("requests are served again")
        self._failures = 0
        self._suspect = None

    def note_unavailable(
        self, request: GenerationRequest, *, arrived_s: float, tokens: int, reason: str
    ) -> None:
        """A request failed because something is missing that may come back.

        Args:
            request: What the engine was asked.
            arrived_s: When its HTTP request came, seconds of ``time.perf_counter``.
            tokens: How many it had generated before.
            reason: What its client is told.
        """
        if arrived_s <= self._last_failure_s:
            return
        self._last_failure_s = time.perf_counter()
        self._failures += 1
        self._last_reason = reason
        tokens = min(tokens + 1, _MOST_PROBED_TOKENS)
        sampling = replace(request.sampling, max_tokens=tokens, logprobs=None)
        self._suspect = replace(request, sampling=sampling)
        if self._failures == _FAILURES_ALLOWED:
            _log.error("%s; /health is 503 until one works", self.reason)
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    def close(self) -> None:
        """Try nothing any more."""
        if self._probing is not None:
            self._probing.cancel()

    async def _probe(self) -> None:
        """Try what failed last until it works, or another request did."""
        pause_s = self._first_retry_s
        while self.reason is not None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._longest_retry_s)
            suspect = self._suspect
            if suspect is not None and await self._works(suspect):
                self.note_served()

    async def _works(self, request: GenerationRequest) -> bool:
        request = replace(request, request_id=f"probe-{uuid.uuid4().hex}")
        try:
            stream = self._engine.submit(request)
            while (event := await stream.next_event()) is not None:
                if event.finish_reason is not None:
                    return event.finish_reason in {"stop", "length"}
        except MoelessError:
            return False
        finally:
            self._engine.cancel(request.request_id)
        return False
