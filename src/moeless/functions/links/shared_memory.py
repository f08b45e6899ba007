"""Anonymous shared memory: it has no name, so nobody else can open it and nothing is left behind.

A region lives as long as some process holds its descriptor or mapping.
"""

import mmap
import os


def create(name: str, num_bytes: int) -> int:
    """Create a region of zeros; pages take memory when first written.

    Args:
        name: Shown in ``/proc/PID/maps`` for debugging only.
        num_bytes: Its size.

    Returns:
        A descriptor that can be sent to other processes.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def attach(fd: int, *, write: bool = True) -> mmap.mmap:
    """Map a region for reading, and for writing if asked; the descriptor may be closed then."""
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
    return mmap.mmap(fd, os.fstat(fd).st_size, access=access)
