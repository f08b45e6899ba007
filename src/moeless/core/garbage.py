"""Keeps the garbage collector away from what a process holds until it ends.

A full collection walks every object that there is. With torch and a model loaded that is a long
pause in the middle of serving, and again, several times over, when the process ends.
"""

import gc


def exempt_what_stays() -> None:
    """Collect once, then leave everything that exists now out of later collections.

    For a process that has started up and begins to serve.
    """
    gc.collect()
    gc.freeze()
