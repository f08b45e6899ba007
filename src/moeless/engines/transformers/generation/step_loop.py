"""One step after another: prefill, decode, choose tokens, let rows join and leave.

Runs on the engine thread only. This module must not know threads or how requests arrive.
"""

import logging
import math
from collections.abc import Callable, Iterable

import torch

from moeless.core.generation import FinishReason, TokenEvent, TokenLogprob
from moeless.engines.transformers.generation.batch_cache import BatchCache
from moeless.engines.transformers.generation.health import HealthMonitor
from moeless.engines.transformers.generation.model_runner import ModelRunner
from moeless.engines.transformers.generation.observer import (
    GenerationObserver,
    Phase,
    StepPart,
    StepRecorder,
    tell,
)
from moeless.engines.transformers.generation.sampler import Choice, find_best
from moeless.engines.transformers.generation.scheduler import PrefillPiece, PrefillStep, Scheduler
from moeless.engines.transformers.generation.sequence import Sequence
from moeless.engines.transformers.generation.streams import deliver
from moeless.engines.transformers.generation.text_codec import TextCodec
from moeless.errors import EngineError, MoelessError, UnavailableError

logger = logging.getLogger(__name__)

_SMOOTHING = 0.2


def describe_failure(error: Exception) -> str:
    """One line for the client: our own messages as they are, of others only the kind.

    A foreign message may quote tensors, paths or the prompt; the log has the whole story.
    """
    if isinstance(error, MoelessError) and str(error):
        return str(error).splitlines()[0]
    return f"the model failed on this request ({type(error).__name__})"


def _failed(sequence: Sequence, error: Exception) -> TokenEvent:
    """The last event of a request that ends with ``error``."""
    unavailable = isinstance(error, UnavailableError)
    return sequence.ending("error", describe_failure(error), unavailable=unavailable)


def _require_all_finite(best: list[tuple[float, int]]) -> None:
    # Masked columns count zero times their value, and zero times NaN is NaN: one packed prompt's
    # numbers may have spoiled the others'.
    if not all(math.isfinite(maximum) for maximum, _ in best):
        raise EngineError("a packed prompt has logits that are not finite")


_Computed = tuple[Sequence, int, tuple[int, ...]]
"""Whose tokens a forward computes, the position of the first, and the tokens."""


def _computed_next(row: Sequence) -> _Computed:
    """The token that a running row's next decode computes: the last one that it chose."""
    position = row.prompt_tokens + row.completion_tokens - 1
    return row, position, (row.last_token_id,)


class StepLoop:
    """Advances all admitted sequences.

    Args:
        runner: Runs the model.
        scheduler: Says what comes next.
        batch: An empty cache for the running rows.
        codec: Names tokens beside their log-probabilities.
        health: Told of every forward that failed or worked.
        observer: Told of steps and tokens.
        clock: Seconds, monotonic.
        on_ended: Called with each sequence whose last event was delivered here.

    ``recorder``, which may be set between steps, is told whose tokens each forward computes.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        scheduler: Scheduler[Sequence],
        batch: BatchCache,
        codec: TextCodec,
        health: HealthMonitor,
        observer: GenerationObserver,
        clock: Callable[[], float],
        on_ended: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self.scheduler = scheduler
        self.recorder: StepRecorder | None = None
        self._runner = runner
        self._batch = batch
        self._codec = codec
        self._health = health
        self._observer = observer
        self._clock = clock
        self._on_ended = on_ended
        self._prompt_cache: BatchCache | None = None
        self._decode_s = 0.0

    def seconds_to_next_end(self) -> float:
        """When a running sequence will end at the latest, by the pace of recent steps."""
        remaining = [sequence.remaining_tokens for sequence in list(self.scheduler.running)]
        return min(remaining, default=0) * self._decode_s

    def drop(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """Free what a sequence holds; its stream has ended."""
        if sequence in self.scheduler.prefilling:
            self._prompt_cache = None
        row = self.scheduler.remove(sequence)
        if row is not None:
            self._batch.remove_row(row, scrub=scrub)

    def step(self) -> bool:
        """Do one forward and what follows from it; False when there is nothing to do."""
        step = self.scheduler.next_step()
        if step is None:
            return False
        if not isinstance(step, PrefillStep):
            self._decode()
            return True
        self._tell_started(step)
        if len(step.pieces) > 1:
            self._prefill_packed(step)
        else:
            self._prefill(step.pieces[0])
        return True

    def _tell_started(self, step: PrefillStep[Sequence]) -> None:
        now_s = self._clock()
        for piece in step.pieces:
            if piece.start == 0:
                tell(self._observer.request_started, now_s - piece.sequence.arrived_s)

    def probe(self) -> None:
        """Try a broken model again with a token of our own."""
        try:
            self._runner.prefill(BatchCache.for_prefill(1), [0])
        except Exception as error:
            logger.exception("the model is still broken")
            self._health.record_failed_retry(describe_failure(error), self._clock())
        else:
            self._health.record_success()

    def fail(self, sequence: Sequence, error: Exception, *, scrub: bool = False) -> None:
        """End a sequence with an error, wherever it is."""
        self.drop(sequence, scrub=scrub)
        self._deliver([(sequence, _failed(sequence, error))])

    def _prefill(self, piece: PrefillPiece[Sequence]) -> None:
        sequence = piece.sequence
        started_s = self._clock()
        if piece.start == 0:
            self._prompt_cache = BatchCache.for_prefill(sequence.prompt_tokens)
        cache = self._prompt_cache
        assert cache is not None
        try:
            prompt_ids = sequence.request.prompt_ids[piece.start : piece.stop]
            self._step_begins("prefill", [(sequence, piece.start, prompt_ids)], started_s)
            logits = self._runner.prefill(cache, prompt_ids)
            best = find_best(logits) if piece.is_last else []
        except Exception as error:
            logger.exception("prefill failed")
            self._health.record_failure(describe_failure(error), self._clock())
            self.fail(sequence, error)
            return
        self._step_finished("prefill", piece.stop - piece.start, started_s)
        if piece.is_last:
            self._prompt_cache = None
            event = self._advance(sequence, logits, 0, best[0])
            self._join(sequence, cache, slice(0, piece.stop), event)

    def _prefill_packed(self, step: PrefillStep[Sequence]) -> None:
        """Prefill several prompts at once; alone if that fails, so only the guilty one ends."""
        started_s = self._clock()
        cache = BatchCache.for_prefill(step.tokens)
        prompts = [piece.sequence.request.prompt_ids for piece in step.pieces]
        pieces = ((piece.sequence, 0, piece.sequence.request.prompt_ids) for piece in step.pieces)
        self._step_begins("prefill", pieces, started_s)
        try:
            logits = self._runner.prefill_packed(cache, prompts)
            best = find_best(logits)
            _require_all_finite(best)
        except Exception:
            logger.exception("%d packed prompts failed; trying each alone", len(prompts))
            for piece in step.pieces:
                self._prefill(piece)
            return
        self._step_finished("prefill", step.tokens, started_s)
        start = 0
        for row, piece in enumerate(step.pieces):
            columns = slice(start, start + piece.stop)
            start = columns.stop
            event = self._advance(piece.sequence, logits, row, best[row])
            self._join(piece.sequence, cache, columns, event)

    def _join(
        self, sequence: Sequence, cache: BatchCache, columns: slice, event: TokenEvent
    ) -> None:
        """Make a prefilled sequence the last row, unless its first token was its last."""
        if event.finish_reason is None:
            try:
                self._batch.append_row(cache, columns)
            except Exception as error:
                logger.exception("no room for another row")
                event = _failed(sequence, error)
        if event.finish_reason is None:
            self.scheduler.start_running(sequence)
        else:
            self.scheduler.remove(sequence)
        self._deliver([(sequence, event)])

    def _decode(self) -> None:
        rows = list(self.scheduler.running)
        try:
            self._batch.reserve(1)
        except Exception as error:
            logger.exception("the cache cannot grow; its longest row makes room")
            longest = max(range(len(rows)), key=self._batch.lengths.__getitem__)
            self.fail(rows[longest], error)
            return
        token_ids = [sequence.last_token_id for sequence in rows]
        started_s = self._clock()
        failures: dict[int, Exception] = {}
        self._step_begins("decode", map(_computed_next, rows), started_s)
        try:
            logits = self._runner.decode(self._batch, token_ids)
            best = find_best(logits)
        except Exception:
            logger.exception("a batch of %d rows failed; trying each row alone", len(rows))
            self._step_begins("decode", map(_computed_next, rows), started_s)
            logits, failures = self._runner.decode_alone(self._batch, token_ids)
            best = find_best(logits)
        if len(failures) < len(rows):
            self._step_finished("decode", len(rows), started_s, whole=not failures)
        deliveries: list[tuple[Sequence, TokenEvent]] = []
        broken: set[int] = set()
        for row, sequence in enumerate(rows):
            event = self._advance(sequence, logits, row, best[row], failures.get(row))
            deliveries.append((sequence, event))
            if event.finish_reason == "error":
                broken.add(row)
        # From the last row down, so that a row that moves into a hole has been looked at.
        for row in range(len(rows) - 1, -1, -1):
            if deliveries[row][1].finish_reason is not None:
                self.drop(rows[row], scrub=row in broken)
        self._deliver(deliveries)

    def _advance(
        self,
        sequence: Sequence,
        logits: torch.Tensor,
        row: int,
        best: tuple[float, int],
        failure: Exception | None = None,
    ) -> TokenEvent:
        """Choose a row's next token; whatever goes wrong here ends this request only."""
        try:
            if failure is not None:
                self._health.record_failure(describe_failure(failure), self._clock())
                return _failed(sequence, failure)
            choice = sequence.sampler.choose(logits, row, best)
            return sequence.accept(choice.token_id, self._name_logprobs(choice))
        except Exception as error:
            logger.exception("a request failed outside the model")
            return _failed(sequence, error)

    def _name_logprobs(self, choice: Choice) -> TokenLogprob | None:
        if choice.logprob is None:
            return None
        name = self._codec.decode_token
        return TokenLogprob(
            token_id=choice.token_id,
            token=name(choice.token_id),
            logprob=choice.logprob,
            top=tuple((token_id, name(token_id), value) for token_id, value in choice.top),
        )

    def _step_begins(self, phase: Phase, tokens: Iterable[_Computed], started_s: float) -> None:
        if self.recorder is not None:
            parts = [
                StepPart(row.request.request_id, phase, len(token_ids), start, tuple(token_ids))
                for row, start, token_ids in tokens
            ]
            tell(self.recorder.begin_step, parts, started_s)

    def _step_finished(
        self, phase: Phase, tokens: int, started_s: float, *, whole: bool = True
    ) -> None:
        self._health.record_success()
        if self.recorder is not None and whole:
            tell(self.recorder.keep_step)
        duration_s = self._clock() - started_s
        if phase == "decode":
            weight = _SMOOTHING if self._decode_s else 1.0
            self._decode_s += weight * (duration_s - self._decode_s)
        tell(self._observer.step_finished, phase, tokens, duration_s)

    def _deliver(self, deliveries: list[tuple[Sequence, TokenEvent]]) -> None:
        now_s = self._clock()
        taken = deliver((sequence.stream, event) for sequence, event in deliveries)
        for (sequence, event), was_taken in zip(deliveries, taken, strict=True):
            if not was_taken:
                continue  # cancelled meanwhile
            if event.token_ids:
                self._time_token(sequence, now_s)
            if event.finish_reason is not None:
                self._on_ended(sequence, event.finish_reason)

    def _time_token(self, sequence: Sequence, now_s: float) -> None:
        if sequence.last_token_s is None:
            wait_s = now_s - sequence.arrived_s
            tell(self._observer.first_token, wait_s, sequence.prompt_tokens)
        else:
            tell(self._observer.next_token, now_s - sequence.last_token_s)
        sequence.last_token_s = now_s
