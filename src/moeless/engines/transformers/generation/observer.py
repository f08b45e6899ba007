"""What an observer of the engine may hear about. This module must not know any metric system."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

from moeless.core.generation import FinishReason

logger = logging.getLogger(__name__)

Phase = Literal["prefill", "decode"]


class StepMarker(Protocol):
    """Makes the context in which each forward runs, so that others can tell steps apart."""

    def __call__(self, phase: Phase, tokens: int) -> AbstractContextManager[object]:
        """A context for one forward of ``tokens`` tokens."""
        ...


class StepPart(NamedTuple):
    """The tokens of one request in a forward; all are computed, none is padding.

    ``start`` is the position of the first of them in its sequence, and ``token_ids`` names them.
    """

    request_id: str
    phase: Phase
    tokens: int
    start: int
    token_ids: tuple[int, ...]


class StepRecorder(Protocol):
    """Hears whose tokens each forward computes. Called on the engine thread."""

    def begin_step(self, parts: Sequence[StepPart], at_s: float) -> None:
        """The next forward computes these tokens, in this order.

        A step that began before and was not kept has failed: its tokens come again, or never.

        Args:
            parts: One per request.
            at_s: When it begins, by the engine's clock.
        """
        ...

    def keep_step(self) -> None:
        """The step that began last is done, and what it computed is used."""
        ...


class GenerationObserver:
    """Hears of everything and does nothing; override what you need.

    All methods are called on the engine thread (``request_submitted``: on the caller's) and
    must return quickly. An exception in one is logged and otherwise ignored.
    """

    def request_submitted(self, prompt_tokens: int) -> None:
        """A request was accepted."""

    def request_started(self, wait_s: float) -> None:
        """A request's first forward begins, ``wait_s`` after it was submitted."""

    def first_token(self, ttft_s: float, prompt_tokens: int) -> None:
        """A request has its first token, ``ttft_s`` after it was submitted."""

    def next_token(self, inter_token_s: float) -> None:
        """A request has a further token, ``inter_token_s`` after the one before."""

    def step_finished(self, phase: Phase, tokens: int, duration_s: float) -> None:
        """A forward of ``tokens`` tokens took ``duration_s``."""

    def queue_changed(self, running: int, waiting: int) -> None:
        """So many requests run and wait; told once in each step."""

    def request_finished(
        self, reason: FinishReason, prompt_tokens: int, completion_tokens: int, duration_s: float
    ) -> None:
        """A request ended."""


def tell(method: Callable[..., None], *args: object) -> None:
    """Call an observer's method; what it raises is logged and goes no further."""
    try:
        method(*args)
    except Exception:
        logger.exception("an observer failed")
