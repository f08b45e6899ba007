"""The ledger's file: SQLite with a write-ahead log, readable by its owner only.

Every row is the usage of one period of one run, so writing a row again replaces it with the same
or a later value of the same period. A transaction is on disk when it has been committed.
"""

import contextlib
import errno
import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from moeless.errors import ConfigError, os_reason
from moeless.telemetry.ledger.meter import KEY_FIELDS, MODEL_FIELDS, Usage

_PERIODS = ("key_usage", "model_usage", "function_usage")
_APPLICATION_ID = 0x4D6F454C  # "MoEL"
_VERSION = 1

_SCHEMA = f"""
CREATE TABLE runs (
    run TEXT PRIMARY KEY, model TEXT NOT NULL, layers INTEGER, experts INTEGER,
    started_s REAL NOT NULL, seen_s REAL NOT NULL, ended_s REAL
) WITHOUT ROWID;
CREATE TABLE key_usage (
    run TEXT NOT NULL, period_s INTEGER NOT NULL, key TEXT NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in KEY_FIELDS)},
    PRIMARY KEY (run, period_s, key)
) WITHOUT ROWID;
CREATE TABLE model_usage (
    run TEXT NOT NULL, period_s INTEGER NOT NULL,
    {", ".join(f"{name} REAL NOT NULL" for name in MODEL_FIELDS)},
    PRIMARY KEY (run, period_s)
) WITHOUT ROWID;
CREATE TABLE function_usage (
    run TEXT NOT NULL, period_s INTEGER NOT NULL, layer INTEGER NOT NULL,
    -- One little-endian float64 for each expert: tokens; billed, resident, reserved GB s.
    tokens BLOB NOT NULL, billed_gb_s BLOB NOT NULL, resident_gb_s BLOB NOT NULL,
    reserved_gb_s BLOB NOT NULL,
    PRIMARY KEY (run, period_s, layer)
);
"""


_GAPS = """
CREATE TABLE IF NOT EXISTS gaps (
    -- Minutes of a run whose usage could not be written, from the first to the last of them.
    run TEXT NOT NULL, first_s INTEGER NOT NULL, last_s INTEGER NOT NULL, minutes INTEGER NOT NULL,
    PRIMARY KEY (run, first_s)
) WITHOUT ROWID
"""


def _upsert(table: str, keys: tuple[str, ...], values: tuple[str, ...]) -> str:
    names = (*keys, *values)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "  # noqa: S608 - names of our own
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in values)
    )


_UPSERT_KEY = _upsert("key_usage", ("run", "period_s", "key"), KEY_FIELDS)
_UPSERT_MODEL = _upsert("model_usage", ("run", "period_s"), MODEL_FIELDS)
_UPSERT_FUNCTION = _upsert(
    "function_usage",
    ("run", "period_s", "layer"),
    ("tokens", "billed_gb_s", "resident_gb_s", "reserved_gb_s"),
)


def open_ledger(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a ledger.

    Args:
        path: The file.
        create: Make it, with mode 0600, if it does not exist; else it is only read. A file of
            something else is left as it is, its mode included.

    Raises:
        ConfigError: It does not exist, cannot be used, or is no ledger.
    """
    try:
        if create:
            if path.exists() and not path.is_file():
                raise ConfigError(f"the ledger {path} cannot be opened: it is no ordinary file")
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        elif not path.is_file():
            raise ConfigError(f"{path} is not a ledger: no such file")
    except OSError as exc:
        raise ConfigError(f"the ledger {path} cannot be opened: {os_reason(exc)}") from None
    # Each call commits by itself unless a transaction was begun. Threads take turns outside.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        _prepare(connection, path, create=create)
    except sqlite3.Error as exc:
        connection.close()
        raise ConfigError(f"{path} cannot be used as a ledger: {ledger_reason(exc)}") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    if not create:
        connection.execute("PRAGMA query_only = ON")
        _check_ours(connection, path)
        return
    if _count_tables(connection):
        _check_ours(connection, path)
    path.chmod(0o600)  # before there is a log, which takes over the mode
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    with transaction(connection):  # of several servers, one makes the tables
        if not _count_tables(connection):
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
    _check_ours(connection, path)
    connection.execute(_GAPS)  # older releases make none, and do not mind it


def _count_tables(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return int(count)


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION_ID:
        raise ConfigError(f"{path} is a database of something else: name another file")
    if version != _VERSION:
        raise ConfigError(
            f"{path} is a ledger of version {version}, this is for version {_VERSION}: "
            f"use another release of moeless, or another file"
        )


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; others may read meanwhile, nobody else writes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def write_usage(connection: sqlite3.Connection, run: str, usage: Usage, *, now_s: float) -> None:
    """Put usage into the ledger; doing it twice is the same as once.

    Args:
        connection: Of ``open_ledger``.
        run: Id of the server's run.
        usage: Of the current periods.
        now_s: Unix seconds.
    """
    with transaction(connection):
        connection.execute("UPDATE runs SET seen_s = ? WHERE run = ?", (now_s, run))
        connection.executemany(
            _UPSERT_KEY,
            [
                (run, usage.minute, key, *map(int, counts))
                for key, counts in usage.keys.items()
                if counts.any()
            ],
        )
        if usage.model is not None:
            connection.execute(_UPSERT_MODEL, (run, usage.minute, *usage.model.tolist()))
        if usage.functions is not None:
            rows = usage.functions.astype("<f8")
            connection.executemany(
                _UPSERT_FUNCTION,
                [
                    (run, usage.hour, layer, *(part.tobytes() for part in rows[:, layer]))
                    for layer in range(rows.shape[1])
                ],
            )


def ledger_reason(error: Exception) -> str:
    """Why a ledger cannot be written, in words; SQLite does not tell a limit from a bad disk."""
    failed = str(getattr(error, "sqlite_errorname", "")).startswith(
        ("SQLITE_IOERR", "SQLITE_FULL")
    )
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    if failed and limited:
        return f"{error}; if not the disk, then: {os_reason(OSError(errno.EFBIG, str(error)))}"
    return str(error)


def begin_run(
    connection: sqlite3.Connection,
    run: str,
    model: str,
    shape: tuple[int, int] | None,
    now_s: float,
) -> None:
    """A server of a model with these layers and experts begins."""
    layers, experts = shape or (None, None)
    connection.execute(
        "INSERT INTO runs (run, model, layers, experts, started_s, seen_s) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (run, model, layers, experts, now_s, now_s),
    )


def end_run(connection: sqlite3.Connection, run: str, now_s: float) -> None:
    """It has ended in peace."""
    connection.execute("UPDATE runs SET ended_s = ? WHERE run = ?", (now_s, run))


def write_gap(
    connection: sqlite3.Connection, run: str, *, first_s: int, last_s: int, minutes: int
) -> None:
    """Note that usage of a run is missing, from one minute to another."""
    connection.execute(
        "INSERT OR REPLACE INTO gaps (run, first_s, last_s, minutes) VALUES (?, ?, ?, ?)",
        (run, first_s, last_s, minutes),
    )


def forget_before(connection: sqlite3.Connection, limit_s: float, *, most_s: float) -> bool:
    """Drop periods that began before ``limit_s``, and give their space back.

    Args:
        connection: Of ``open_ledger``.
        limit_s: Unix seconds.
        most_s: Of what there is, drop the oldest usage of so many seconds at the most.

    Returns:
        Whether there is more to drop.
    """
    oldest = [
        connection.execute(f"SELECT min(period_s) FROM {table}").fetchone()[0]  # noqa: S608 - names of our own
        for table in _PERIODS
    ]
    oldest_s = min((period_s for period_s in oldest if period_s is not None), default=limit_s)
    until_s = min(limit_s, oldest_s + most_s)
    with transaction(connection):
        for table in _PERIODS:
            connection.execute(f"DELETE FROM {table} WHERE period_s < ?", (until_s,))  # noqa: S608 - names of our own
        connection.execute("DELETE FROM gaps WHERE last_s < ?", (until_s,))
        connection.execute("DELETE FROM runs WHERE seen_s < ? AND ended_s IS NOT NULL", (until_s,))
    connection.execute("PRAGMA incremental_vacuum").fetchall()
    return until_s < limit_s
