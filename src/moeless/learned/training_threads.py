"""How many threads train: for small layers one each, and several layers at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moeless.learned.training_options import TrainingOptions

_SEVERAL_FROM_HIDDEN = 1024
"""Hidden size from which X'X is worth several threads."""


def layers_at_once(options: TrainingOptions, hidden: int) -> int:
    """How many small layers descend at the same time, in a thread each.

    Args:
        options: How it is trained.
        hidden: H.
    """
    if options.method == "ridge" or hidden >= _SEVERAL_FROM_HIDDEN:
        return 1
    return torch.get_num_threads()


@contextmanager
def training_threads(hidden: int) -> Iterator[None]:
    """Use one thread of torch where several would mostly wait for each other.

    Fitting a small model is tens of thousands of small operations. Each ends when its slowest
    thread does, and on a machine that does anything else that is a time slice away: seconds
    become a minute (docs/log.md).

    Args:
        hidden: H.
    """
    before = torch.get_num_threads()
    if hidden >= _SEVERAL_FROM_HIDDEN or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
