"""What tests may spend: how long they wait at most, and how many examples they draw.

No verdict depends on how fast or busy the machine is. A test that waits for something waits up to
``PATIENCE_S``, which only a test that fails ever uses up; a short wait would call a slow machine
broken. Examples of hypothesis have no deadline.

How much is drawn differs between ``make test`` and ``make test-rest``, which runs the tests of
hypothesis again: with ``MOELESS_TESTS=all`` they draw all examples, without it a quarter of them.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
from hypothesis import settings

PATIENCE_S = 300.0
"""The longest that a test waits for what must happen, on any machine."""

THOROUGH = os.environ.get("MOELESS_TESTS") == "all"

_LEAST_EXAMPLES = 10


def wait_until(condition: Callable[[], Any], what: str = "the condition never held") -> Any:
    """Return what ``condition`` gives, once it is true: what other threads and processes do."""
    gave_up_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < gave_up_s, what
        time.sleep(0.005)
    return value


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended although all were waited for; reaps the others."""
    return psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def drawn(examples: int, *, steps: int | None = None) -> settings:
    """Effort of a test of hypothesis (as its decorator) or of a state machine (as ``settings``).

    Args:
        examples: How many are drawn in the thorough run.
        steps: Longest run of a state machine.
    """
    chosen = settings(max_examples=count_examples(examples))
    return chosen if steps is None else settings(chosen, stateful_step_count=steps)


def count_examples(thorough: int) -> int:
    """Examples of this run, of those that the thorough one draws."""
    return thorough if THOROUGH else max(_LEAST_EXAMPLES, thorough // 4)
