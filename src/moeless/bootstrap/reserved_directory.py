"""An output directory that is made before long work, and leaves nothing if the work fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeless.errors import ConfigError, os_reason


@contextmanager
def reserved_directory(path: Path, *, option: str = "--out") -> Iterator[None]:
    """Make a directory; take away what was made, if it is still empty, when the block fails.

    Args:
        path: The directory; parents that are missing are made, too.
        option: Its name on the command line, for messages.

    Raises:
        ConfigError: It is a file, or cannot be made.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{option} {path} is a file; name a directory")
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_empty(missing)
        raise ConfigError(
            f"{option} {path} cannot be made ({os_reason(error)}); choose another directory"
        ) from error
    try:
        yield
    except BaseException:
        _remove_empty(missing)
        raise


def _remove_empty(directories: list[Path]) -> None:
    """From the innermost outwards, up to the first one that holds something."""
    for directory in directories:
        try:
            directory.rmdir()
        except OSError:
            return
