"""Keeps an engine busy with prompts while its routing is recorded, until all are answered."""

import asyncio
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from moeless.core.generation import GenerationRequest, SamplingParams, TextEngine
from moeless.errors import EngineError, MoelessError, RequestError
from moeless.workloads.recording.recorder import RoutingRecorder

_REQUEST = "prompt-"


def prompt_number(request_id: str) -> int:
    """The number of the prompt that a request of a ``PromptFeeder`` is about."""
    return int(request_id.removeprefix(_REQUEST))


@dataclass(kw_only=True)
class FeedState:
    """How far it got.

    Args:
        finished: Prompts that were answered to the end.
        already: Prompts that an earlier recording answered.
        skipped: Prompts that the model cannot serve.
        skip_reason: Why the last of those was skipped.
        full: Whether it ended early because nothing more is to be recorded.
        interrupted: Whether the user ended it early.
        failure: What else ended it early.
    """

    finished: int = 0
    already: int = 0
    skipped: int = 0
    skip_reason: str | None = None
    full: bool = False
    interrupted: bool = False
    failure: MoelessError | None = None


class PromptFeeder:
    """Sends prompts to an engine and tells a recorder which are complete.

    Args:
        engine: Answers prompts.
        recorder: Told of complete requests, and asked whether it has failed.
        sampling: How to choose tokens; each prompt adds its number to the seed, and generates
            less where the model serves no more tokens.
        raw: Continue prompts as they are, even if the model has a chat template.
        on_progress: Told after each prompt.
        is_full: Asked whether enough is recorded.
    """

    def __init__(
        self,
        engine: TextEngine,
        recorder: RoutingRecorder,
        *,
        sampling: SamplingParams,
        raw: bool,
        on_progress: Callable[[FeedState], None],
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._sampling = sampling
        self._raw = raw
        self._on_progress = on_progress
        self._is_full = is_full
        self._state = FeedState()

    def feed(
        self, prompts: Sequence[str], *, at_once: int, already: Collection[int] = ()
    ) -> FeedState:
        """Answer all prompts.

        SIGINT ends it early, as does the first prompt on which the model fails; so does a
        recording that is full, with some prompts half answered.

        Args:
            prompts: Texts.
            at_once: Prompts that are with the engine at the same time, running or waiting.
            already: Numbers of prompts that are left out, as an earlier recording has them.
        """
        numbered = [each for each in enumerate(prompts) if each[0] not in already]
        self._state.already = len(prompts) - len(numbered)
        try:
            asyncio.run(self._feed(iter(numbered), at_once))
        except MoelessError as error:
            self._state.failure = error
        return self._state

    async def _feed(self, numbered: Iterator[tuple[int, str]], at_once: int) -> None:
        working = asyncio.gather(*(self._work(numbered) for _ in range(at_once)))

        def interrupt() -> None:
            self._state.interrupted = True
            working.cancel()

        with _on_sigint(interrupt):
            try:
                await working
            except asyncio.CancelledError:
                if not self._state.interrupted:
                    raise

    async def _work(self, numbered: Iterator[tuple[int, str]]) -> None:
        for number, prompt in numbered:
            if self._is_full():
                self._state.full = True
                return
            try:
                request = self._make_request(number, prompt)
            except RequestError as error:
                self._state.skipped += 1
                self._state.skip_reason = str(error)
            else:
                if not await self._answer(request):
                    self._state.full = True
                    return
                self._state.finished += 1
            self._on_progress(self._state)

    def _make_request(self, number: int, prompt: str) -> GenerationRequest:
        ids = self._encode(prompt)
        room = self._engine.max_model_len - len(ids)
        if not ids or room < 1:
            raise RequestError(
                f"a prompt has {len(ids)} tokens, but the model serves 1 to "
                f"{self._engine.max_model_len - 1}"
            )
        sampling = replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, room),
            seed=(self._sampling.seed or 0) + number,
        )
        return GenerationRequest(
            request_id=f"{_REQUEST}{number}", prompt_ids=tuple(ids), sampling=sampling
        )

    def _encode(self, prompt: str) -> list[int]:
        if not self._raw:
            try:
                return self._engine.encode_chat([{"role": "user", "content": prompt}])
            except RequestError as error:
                if error.code != "no_chat_template":
                    raise
        return self._engine.encode(prompt)

    async def _answer(self, request: GenerationRequest) -> bool:
        """Whether it was answered to the end, with all that is recorded of it."""
        stream = self._engine.submit(request)
        while (event := await stream.next_event()) is not None:
            if self._recorder.failure is not None:
                raise self._recorder.failure
            if self._is_full():
                return False
            if event.finish_reason == "error":
                raise EngineError(event.error or "the model failed on a prompt")
        self._recorder.finish(request.request_id)
        return True


@contextmanager
def _on_sigint(call: Callable[[], None]) -> Iterator[None]:
    """Have SIGINT make a call between two events instead of breaking in anywhere."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
