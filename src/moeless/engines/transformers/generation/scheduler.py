"""Which sequence is worked on next: waiting, prefilling or running.

Pure bookkeeping over anything that has a prompt length; it must not know torch, tokens or text.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler needs of a sequence."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to prefill, at least one."""
        ...


T = TypeVar("T", bound=Schedulable)


@dataclass(frozen=True, kw_only=True)
class PrefillPiece(Generic[T]):
    """``sequence``'s prompt tokens [start, stop)."""

    sequence: T
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this piece."""
        return self.stop == self.sequence.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class PrefillStep(Generic[T]):
    """Run these pieces through the model: one of any prompt, or several whole prompts."""

    pieces: tuple[PrefillPiece[T], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Run one token of every running sequence through the model."""


class Scheduler(Generic[T]):
    """First come, first served; prompts in chunks between decode steps.

    Args:
        max_batch_size: Sequences that run or prefill at the same time.
        prefill_chunk_tokens: Prompt tokens that may delay one decode step.
        pack_prompts: Whether one prefill step may hold several short prompts.

    Between two decode steps, prefill steps are handed out until their tokens add up to
    ``prefill_chunk_tokens``; a short step counts as an eighth of it, because each forward has a
    price of its own. So a burst of short prompts joins quickly and nobody's decoding starves.
    ``running`` is in the order of the batch's rows.
    """

    def __init__(
        self, *, max_batch_size: int, prefill_chunk_tokens: int, pack_prompts: bool = False
    ) -> None:
        self._max_batch_size = max_batch_size
        self._chunk_tokens = prefill_chunk_tokens
        self._pack_prompts = pack_prompts
        self._least_cost = max(1, prefill_chunk_tokens // 8)
        self._budget = prefill_chunk_tokens
        self._prefilled = 0
        self.waiting: deque[T] = deque()
        self.prefilling: list[T] = []
        self.running: list[T] = []

    def add(self, sequence: T) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def next_step(self) -> PrefillStep[T] | DecodeStep | None:
        """What to do now; None when there is nothing.

        A prefill step that is handed out counts as done; call ``start_running`` for each
        sequence whose prompt is complete.
        """
        if self._budget > 0 or not self.running:
            if not self.prefilling:
                self._admit()
            if self.prefilling:
                step = PrefillStep(pieces=self._next_pieces())
                self._budget -= max(step.tokens, self._least_cost)
                return step
        self._budget = self._chunk_tokens
        return DecodeStep() if self.running else None

    def _admit(self) -> None:
        """Take the next prompt, and with it as many as fit whole into the same chunk."""
        tokens = 0
        self._prefilled = 0
        while self.waiting and len(self.running) + len(self.prefilling) < self._max_batch_size:
            tokens += self.waiting[0].prompt_tokens
            if self.prefilling and not (self._pack_prompts and tokens <= self._chunk_tokens):
                return
            self.prefilling.append(self.waiting.popleft())

    def _next_pieces(self) -> tuple[PrefillPiece[T], ...]:
        if len(self.prefilling) > 1:
            return tuple(
                PrefillPiece(sequence=sequence, start=0, stop=sequence.prompt_tokens)
                for sequence in self.prefilling
            )
        (sequence,) = self.prefilling
        start = self._prefilled
        self._prefilled = min(start + self._chunk_tokens, sequence.prompt_tokens)
        return (PrefillPiece(sequence=sequence, start=start, stop=self._prefilled),)

    def start_running(self, sequence: T) -> None:
        """The prompt of ``sequence`` is complete: it becomes the last row."""
        self.prefilling.remove(sequence)
        self.running.append(sequence)

    def remove(self, sequence: T) -> int | None:
        """Forget a sequence, wherever it is.

        Returns:
            The row that it held, which the last row now has; None if it held none.
        """
        if sequence in self.running:
            row = self.running.index(sequence)
            self.running[row] = self.running[-1]
            self.running.pop()
            return row
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        return None
