"""The directory of a device pool: its sockets, which only its owner may reach.

``moeless serve`` makes a private one for its own supervisor; ``moeless pool serve`` is given one.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moeless.errors import ConfigError, os_reason

_LONGEST_SOCKET = 107
"""Bytes in the path of a Unix socket."""
_LONGEST_BASE = 70
"""Bytes in a folder in which a private directory with sockets can be made."""


@dataclass(frozen=True)
class PoolDirectory:
    """Where the sockets of one supervisor are.

    Args:
        path: The directory, mode 0700.
    """

    path: Path

    @property
    def engine_socket(self) -> Path:
        """Where engines attach."""
        return self.path / "supervisor.sock"

    @property
    def admin_socket(self) -> Path:
        """Where operators change the pool."""
        return self.path / "admin.sock"

    def remove(self) -> None:
        """Take it away with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def private_directory() -> PoolDirectory:
    """Make one with a new name.

    Raises:
        ConfigError: No folder for temporary files can be used.
    """
    for base in possible_bases():
        if len(os.fsencode(base)) <= _LONGEST_BASE and os.access(base, os.W_OK | os.X_OK):
            made = tempfile.mkdtemp(prefix="moeless-", dir=base)  # mode 0700
            return PoolDirectory(Path(made))
    raise ConfigError(
        "no folder for the supervisor's socket: set XDG_RUNTIME_DIR to one that you can write to, "
        f"with at most {_LONGEST_BASE} bytes in its path"
    )


def possible_bases() -> list[str]:
    """Folders in which private directories may be, the best first."""
    bases = [os.environ.get("XDG_RUNTIME_DIR"), "/tmp"]  # noqa: S108
    with contextlib.suppress(FileNotFoundError):  # there is none that can be written
        bases.insert(1, tempfile.gettempdir())
    return [base for base in bases if base]


def make_directory(path: Path) -> PoolDirectory:
    """Make one, or take one that is there and fit for it.

    Args:
        path: Where; folders above it must exist.

    Raises:
        ConfigError: It cannot be made, others may enter it, or its name is too long.
    """
    directory = PoolDirectory(path.absolute())
    longest = os.fsencode(directory.engine_socket)
    if len(longest) > _LONGEST_SOCKET:
        most = _LONGEST_SOCKET - len("/supervisor.sock")
        raise ConfigError(
            f"{path}: the path of a pool has at most {most} bytes, this one has "
            f"{len(os.fsencode(directory.path))}; choose a shorter one"
        )
    try:
        directory.path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: no directory for a pool can be made there ({os_reason(error)}); name "
            f"another one, in a folder that exists and that you may write to"
        ) from error
    _check(directory, path)
    return directory


def find_directory(path: Path) -> PoolDirectory:
    """The directory of a pool that somebody serves.

    Args:
        path: Where.

    Raises:
        ConfigError: No pool is there, or others could have put something in its place.
    """
    directory = PoolDirectory(path.absolute())
    if not directory.engine_socket.is_socket():
        raise ConfigError(
            f"{path}: no pool is there; start one with: moeless pool serve --pool {path}"
        )
    _check(directory, path)
    return directory


def _check(directory: PoolDirectory, named: Path) -> None:
    found = directory.path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{named}: is not a directory; name one")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{named}: belongs to user {found.st_uid}, not to you (user {os.getuid()}); use a "
            f"pool of your own"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{named}: others may enter it (mode {stat.S_IMODE(found.st_mode):04o}); name a "
            f"directory of its own, such as {named / 'moe'}, or chmod 700 it first"
        )
