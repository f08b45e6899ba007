"""Memory that loads leave to everything else.

Large allocations fail with an exception, and loads are rolled back. Small ones are another matter:
libraries write to what they asked for without looking whether they got it, which ends the process
(seen of oneDNN, see docs/log.md), and Python cannot receive an order. So a load asks beforehand
whether there is room for it and for whatever else the process will ask for, and does not even
begin if not. Only then can it be sure that it does not take the last memory from an invocation
beside it.

It is about limits that the system enforces when memory is asked for (``ulimit -v`` and ``-d``,
strict overcommit). A limit on what is really used (a container's) cannot be asked: there the
system ends the process.
"""

import mmap

from moeless.core.model import DTYPE_BYTES, ExpertShape

SMALL_BYTES = 64 << 20
"""For messages, reading ahead, threads, and what libraries build and keep."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def invocation_bytes(shape: ExpertShape, rows: int) -> int:
    """Memory for what one expert computes on the way from input rows to output rows.

    Args:
        shape: The expert.
        rows: Input rows.
    """
    # Input and output, gate and up side by side, and what activations keep at the same time.
    width = 2 * shape.hidden + 5 * shape.intermediate
    return rows * width * DTYPE_BYTES[shape.dtype] * 9 // 8  # and what products need beside


def require_room(load_bytes: int, headroom_bytes: int) -> None:
    """Look whether the process could be given so much memory now; takes some microseconds.

    Args:
        load_bytes: What is about to be allocated.
        headroom_bytes: What must be left then.

    Raises:
        MemoryError: It could not.
    """
    try:
        # No page is touched, so this takes no memory, only the permission to have some.
        mmap.mmap(-1, load_bytes + headroom_bytes, flags=_PRIVATE).close()
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(
            f"the system gives this process no {load_bytes:,} bytes more with "
            f"{headroom_bytes:,} to spare"
        ) from error
