"""The text engine on transformers: requests from any thread, one thread that owns the model.

This module must not know how experts are served, nor any web framework.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any, Self

import torch

from moeless.core.generation import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    SamplingDefaults,
)
from moeless.engines.transformers.generation.batch_cache import BatchCache
from moeless.engines.transformers.generation.context_limit import resolve_max_model_len
from moeless.engines.transformers.generation.detokenizer import TextAssembler
from moeless.engines.transformers.generation.health import HealthMonitor
from moeless.engines.transformers.generation.model_facts import (
    advised_sampling,
    generation_eos_ids,
    require_served_layers,
)
from moeless.engines.transformers.generation.model_runner import ModelRunner
from moeless.engines.transformers.generation.observer import (
    GenerationObserver,
    StepMarker,
    StepRecorder,
    tell,
)
from moeless.engines.transformers.generation.options import EngineOptions
from moeless.engines.transformers.generation.packed_prompts import can_pack
from moeless.engines.transformers.generation.position_scaling import scale_by_position
from moeless.engines.transformers.generation.sampler import RowSampler
from moeless.engines.transformers.generation.scheduler import Scheduler
from moeless.engines.transformers.generation.sequence import Sequence
from moeless.engines.transformers.generation.step_loop import StepLoop
from moeless.engines.transformers.generation.streams import EventStream, deliver
from moeless.engines.transformers.generation.text_codec import TextCodec
from moeless.engines.transformers.generation.validation import validate_request
from moeless.errors import EngineError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_RETRY_AFTER_RANGE_S = (1.0, 60.0)


class TransformersTextEngine:
    """Serves one loaded model; implements ``moeless.core.generation.TextEngine``.

    The engine thread starts at once and lives until ``close``. No request can take it down: what
    fails in one request ends that request; a model that keeps failing makes the engine unhealthy
    until a try of its own succeeds.

    Args:
        model: A loaded transformers causal language model; the engine is its only user.
        tokenizer: Its tokenizer.
        model_id: The id under which it is served.
        options: Limits.
        on_step: Makes a context around each forward.
        observer: Hears of tokens, steps and the queue.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: ``max_model_len`` is beyond what the model can serve, or it cannot be
            batch-invariant.
        ModelError: The model has layers whose state is not keys and values.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        model_id: str,
        options: EngineOptions | None = None,
        on_step: StepMarker | None = None,
        observer: GenerationObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options or EngineOptions()
        config = model.config.get_text_config()
        require_served_layers(config)
        self._model_id = model_id
        self._max_model_len = resolve_max_model_len(config, self._options.max_model_len)
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._codec = TextCodec(tokenizer)
        self._eos_ids = self._codec.eos_ids | generation_eos_ids(model)
        self._sampling_defaults = advised_sampling(model.generation_config)
        self._observer = observer or GenerationObserver()
        self._recorder: StepRecorder | None = None
        self._clock = clock
        model.eval()
        scale_by_position(model, self._max_model_len)
        self._health = HealthMonitor(first_retry_s=self._options.first_retry_s)
        invariant = self._options.batch_invariant
        self._runner = ModelRunner(model, on_step, batch_invariant=invariant)
        # Prompts side by side would be computed together.
        self._can_pack = can_pack(config) and not invariant
        self._loop = self._make_loop()
        self._changed = threading.Condition()
        self._live: dict[str, Sequence] = {}
        self._arrived: deque[Sequence] = deque()
        self._cancelled: deque[Sequence] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="moeless-engine", daemon=True)
        self._thread.start()

    @property
    def model_id(self) -> str:
        """The id under which the model is served."""
        return self._model_id

    @property
    def model(self) -> Any:
        """The model, to be looked at and hooked, not changed."""
        return self._runner.model

    @property
    def max_model_len(self) -> int:
        """Prompt plus completion tokens that fit into one sequence."""
        return self._max_model_len

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model's generation config advises."""
        return self._sampling_defaults

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; see ``TextEngine``."""
        return self._codec.encode(text)

    def encode_chat(self, messages: Tokens[dict[str, str]]) -> list[int]:
        """Token ids of a conversation; see ``TextEngine``."""
        return self._codec.encode_chat(messages)

    def decode(self, token_ids: Tokens[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._codec.decode(token_ids)

    def submit(self, request: GenerationRequest) -> EventStream:
        """Queue a request; see ``TextEngine``."""
        validate_request(request, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        sequence = Sequence(
            request=request,
            sampler=RowSampler(request.sampling),
            text=TextAssembler(self._codec.decode, request.sampling.stop),
            eos_ids=self._eos_ids,
            arrived_s=self._clock(),
        )
        with self._changed:
            self._require_room(request.request_id)
            self._live[request.request_id] = sequence
            self._arrived.append(sequence)
            self._changed.notify()
        tell(self._observer.request_submitted, sequence.prompt_tokens)
        return sequence.stream

    def cancel(self, request_id: str) -> None:
        """Stop a request: its stream ends now, its row is free before the next step."""
        with self._changed:
            sequence = self._live.get(request_id)
        if sequence is None:
            return
        if self._end(sequence, "cancelled"):
            with self._changed:
                self._cancelled.append(sequence)
                self._changed.notify()

    def stats(self) -> EngineStats:
        """The current state."""
        scheduler = self._loop.scheduler
        running = len(scheduler.running) + len(scheduler.prefilling)
        reason = self._health.reason
        if self._closing:
            reason = "the engine is closed"
        return EngineStats(
            running=running,
            waiting=max(0, len(self._live) - running),
            max_batch_size=self._options.max_batch_size,
            max_model_len=self._max_model_len,
            healthy=reason is None,
            reason=reason,
        )

    def record_steps(self, recorder: StepRecorder | None) -> None:
        """Have somebody told whose tokens each further step computes; None ends it."""
        self._recorder = self._loop.recorder = recorder

    def close(self) -> None:
        """End all streams with ``cancelled`` and stop the thread. May be called again."""
        with self._changed:
            self._closing = True
            sequences = list(self._live.values())
            self._changed.notify()
        for sequence in sequences:
            self._end(sequence, "cancelled")
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        """Nothing to do: the engine runs since it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _make_loop(self) -> StepLoop:
        options = self._options
        loop = StepLoop(
            runner=self._runner,
            scheduler=Scheduler(
                max_batch_size=options.max_batch_size,
                # A pack no longer than a sequence may be keeps its positions within the model's.
                prefill_chunk_tokens=min(options.prefill_chunk_tokens, self._max_model_len),
                pack_prompts=self._can_pack,
            ),
            batch=BatchCache(max_rows=options.max_batch_size, max_length=self._max_model_len),
            codec=self._codec,
            health=self._health,
            observer=self._observer,
            clock=self._clock,
            on_ended=self._forget,
        )
        loop.recorder = self._recorder
        return loop

    def _require_room(self, request_id: str) -> None:
        if self._closing:
            raise EngineError("the engine is closed; start a new one")
        if not self._health.healthy:
            raise EngineError(
                f"the engine is unhealthy and tries to recover: {self._health.reason}"
            )
        if request_id in self._live:
            raise RequestError(
                f"request id {request_id!r} is in use; ids of live requests must differ",
                param="request_id",
            )
        waiting = len(self._live) - self._options.max_batch_size
        if waiting >= self._options.max_waiting:
            low, high = _RETRY_AFTER_RANGE_S
            retry_after_s = min(max(self._loop.seconds_to_next_end(), low), high)
            raise QueueFullError(
                f"{waiting} requests wait, which is the limit; try again in {retry_after_s:.0f} s",
                retry_after_s=retry_after_s,
            )

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closing:
                try:
                    self._advance()
                except Exception:
                    logger.exception("the engine loop failed; its requests end, it goes on")
                    self._health.record_failure("internal error", self._clock())
                    self._start_anew("the engine had an internal error")

    def _advance(self) -> None:
        """Let requests in and out, then do one step; sleep when there is none."""
        self._exchange()
        if self._health.healthy:
            worked = self._loop.step()
            if not self._health.healthy:
                self._start_anew(
                    f"the engine is unhealthy: {self._health.reason}", unavailable=True
                )
            self._tell_queue()
            if not worked:
                self._sleep(None)
        elif wait_s := self._health.seconds_to_retry(self._clock()):
            self._sleep(wait_s)
        else:
            self._loop.probe()

    def _exchange(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        for sequence in arrived:
            self._loop.scheduler.add(sequence)
        for sequence in cancelled:
            self._loop.drop(sequence)

    def _sleep(self, seconds: float | None) -> None:
        with self._changed:
            if not (self._arrived or self._cancelled or self._closing):
                self._changed.wait(seconds)

    def _start_anew(self, error: str, *, unavailable: bool = False) -> None:
        """End every request with an error and begin with an empty batch."""
        with self._changed:
            sequences = list(self._live.values())
            self._arrived.clear()
            self._cancelled.clear()
            self._loop = self._make_loop()
        for sequence in sequences:
            self._end(sequence, "error", error, unavailable=unavailable)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        unavailable: bool = False,
    ) -> bool:
        event = sequence.ending(reason, error, unavailable=unavailable)
        (taken,) = deliver([(sequence.stream, event)])
        if taken:
            self._forget(sequence, reason)
        return taken

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        with self._changed:
            self._live.pop(sequence.request.request_id, None)
        duration_s = self._clock() - sequence.arrived_s
        tell(
            self._observer.request_finished,
            reason,
            sequence.prompt_tokens,
            sequence.completion_tokens,
            duration_s,
        )

    def _tell_queue(self) -> None:
        stats = self.stats()
        tell(self._observer.queue_changed, stats.running, stats.waiting)
