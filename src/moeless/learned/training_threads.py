"""How many threads training may use: for small layers one, whatever the machine has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moeless.learned.training_options import TrainingOptions

_SEVERAL_FROM_HIDDEN = 1024
"""Hidden size from which X'X is worth several threads."""


@contextmanager
def training_threads(options: TrainingOptions, hidden: int) -> Iterator[None]:
    """Use one thread of torch where several would mostly wait for each other.

    Fitting gates of a small model is tens of thousands of small operations. Each ends when its
    slowest thread does, and on a machine that does anything else that is a time slice away:
    seconds become a minute (docs/log.md). Perceptrons have work enough for several.

    Args:
        options: How it is trained.
        hidden: H.
    """
    before = torch.get_num_threads()
    small = hidden < _SEVERAL_FROM_HIDDEN and options.method != "mlp"
    if not small or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
