"""Finding the pool that an operator means: the one named, or the only one that runs."""

import os
import socket
from pathlib import Path

from moeless.errors import ConfigError
from moeless.functions.supervisor.pool_directory import (
    PoolDirectory,
    find_directory,
    possible_bases,
)


def find_pool(named: Path | None) -> PoolDirectory:
    """The pool that is meant.

    Args:
        named: Its directory; None if there is only one to choose.

    Raises:
        ConfigError: No pool is there, or several are and none was named.
    """
    if named is not None:
        return find_directory(named)
    found = running_pools()
    if not found:
        raise ConfigError(
            "no pool of yours is running; start one with moeless serve --invoker process or "
            "moeless pool serve, or name its directory with --pool DIR"
        )
    if len(found) > 1:
        names = ", ".join(str(pool.path) for pool in found)
        raise ConfigError(f"{len(found)} pools are running: {names}; choose one with --pool DIR")
    return found[0]


def running_pools() -> list[PoolDirectory]:
    """Pools of this user that answer, in the folders where ``moeless serve`` makes them."""
    folders = dict.fromkeys(Path(base).absolute() for base in possible_bases())
    found = []
    for folder in folders:
        for path in sorted(socket_path.parent for socket_path in folder.glob("*/admin.sock")):
            pool = PoolDirectory(path)
            if _is_ours(path) and _answers(pool.admin_socket):
                found.append(pool)
    return found


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have put a socket there."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True
