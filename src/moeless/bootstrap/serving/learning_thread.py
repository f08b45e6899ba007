"""A thread of the lowest priority that learns from live traffic and rests most of the time."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from moeless.functions.compute.background import work_in_background

_log = logging.getLogger(__name__)

_ROUND_S = 0.5
"""Between two looks for something to learn from."""
_LONGEST_REST_S = 5.0
_LEAST_WORK_S = 0.005
"""Work shorter than this is not rested from at once, but with what follows."""


class _StoppedError(Exception):
    """The thread is to end, in the middle of its work."""


class LearningThread:
    """Calls somebody who learns, again and again, and keeps the work to a share of a core.

    Args:
        learn: Called every round; is to call ``pause`` between pieces of work.
        share: Part of one core that learning may take, above 0, at most 1.
    """

    def __init__(self, learn: Callable[[], object], *, share: float) -> None:
        self._learn = learn
        self._rest = 1.0 / share - 1.0
        self._began_s = 0.0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="predictor", daemon=True)

    def start(self) -> None:
        """Learn from now on."""
        self.thread.start()

    def close(self) -> None:
        """End the thread, if there is one."""
        self.stopping.set()
        if self.thread.ident is not None:
            self.thread.join(timeout=10.0)

    def pause(self) -> None:
        """Rest so long that work keeps to its share; only in the thread."""
        if threading.current_thread() is not self.thread:
            return
        worked_s = time.perf_counter() - self._began_s
        if worked_s < _LEAST_WORK_S:
            return
        if self.stopping.wait(min(_LONGEST_REST_S, self._rest * worked_s)):
            raise _StoppedError
        self.rested()

    def rested(self) -> None:
        """Count work from now on."""
        self._began_s = time.perf_counter()

    def _run(self) -> None:
        work_in_background()
        with contextlib.suppress(OSError):
            # Of this thread alone: Linux has a priority for each.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            while not self.stopping.wait(_ROUND_S):
                self.rested()
                self._learn()
                self.pause()
        except _StoppedError:
            pass
        except Exception:  # noqa: BLE001 - whatever it was, serving goes on
            _log.exception("learning from live traffic failed; the predictor stays as it is")
