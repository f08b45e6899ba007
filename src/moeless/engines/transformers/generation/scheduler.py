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
class PrefillStep(Generic[T]):
    """Run ``sequence``'s prompt tokens [start, stop) through the model."""

    sequence: T
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this step."""
        return self.stop == self.sequence.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Run one token of every running sequence through the model."""


class Scheduler(Generic[T]):
    """First come, first served; prompts in chunks between decode steps.

    Args:
        max_batch_size: Sequences that run or prefill at the same time.
        prefill_chunk_tokens: Prompt tokens that may delay one decode step.

    Between two decode steps, prefill steps are handed out until their tokens add up to
    ``prefill_chunk_tokens``; a short step counts as an eighth of it, because each forward has a
    price of its own. So a burst of short prompts joins quickly and nobody's decoding starves.
    ``running`` is in the order of the batch's rows.
    """

    def __init__(self, *, max_batch_size: int, prefill_chunk_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._chunk_tokens = prefill_chunk_tokens
        self._least_cost = max(1, prefill_chunk_tokens // 8)
        self._budget = prefill_chunk_tokens
        self._prefilled = 0
        self.waiting: deque[T] = deque()
        self.prefilling: T | None = None
        self.running: list[T] = []

    def add(self, sequence: T) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def next_step(self) -> PrefillStep[T] | DecodeStep | None:
        """What to do now; None when there is nothing.

        A prefill step that is handed out counts as done; call ``start_running`` after the last.
        """
        has_room = len(self.running) < self._max_batch_size
        if self.prefilling is None and self.waiting and has_room:
            self.prefilling = self.waiting.popleft()
            self._prefilled = 0
        if self.prefilling is not None and (self._budget > 0 or not self.running):
            start = self._prefilled
            stop = min(start + self._chunk_tokens, self.prefilling.prompt_tokens)
            self._prefilled = stop
            self._budget -= max(stop - start, self._least_cost)
            return PrefillStep(sequence=self.prefilling, start=start, stop=stop)
        self._budget = self._chunk_tokens
        return DecodeStep() if self.running else None

    def start_running(self, sequence: T) -> None:
        """The prompt of ``sequence`` is complete: it becomes the last row."""
        self.prefilling = None
        self.running.append(sequence)

    def remove(self, sequence: T) -> int | None:
        """Forget a sequence, wherever it is.

        Returns:
            The row that it held, which the last row now has; None if it held none.
        """
        if sequence is self.prefilling:
            self.prefilling = None
            return None
        if sequence in self.running:
            row = self.running.index(sequence)
            self.running[row] = self.running[-1]
            self.running.pop()
            return row
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        return None
