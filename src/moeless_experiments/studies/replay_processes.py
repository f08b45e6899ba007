"""Processes that replays of a run share."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from moeless_experiments.context import Context


def replay_pool(context: Context) -> ProcessPoolExecutor:
    """Processes that live until the run ends: starting one takes longer than most replays."""
    return context.share(
        ("replay processes",),
        lambda: ProcessPoolExecutor(
            context.threads,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_one_thread,
        ),
    )


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
