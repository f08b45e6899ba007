"""Whether an input is a file that can be opened; one line says why not."""

import stat
from pathlib import Path

from moeless.errors import TraceError


def require_file(path: Path, wanted: str) -> None:
    """Check that a path names a regular file.

    A pipe or device would block or never end, so they are refused too.

    Args:
        path: The input.
        wanted: What to name instead, for example ``an .npz file``.

    Raises:
        TraceError: It does not.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file; name {wanted}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"{path}: cannot be opened ({reason}); name {wanted}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise TraceError(f"{path}: is {kind}; name {wanted}")
