"""Writes a server's usage down once a second, on a thread of its own."""

import datetime
import logging
import sqlite3
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moeless.errors import ConfigError
from moeless.telemetry.ledger.file import (
    begin_run,
    end_run,
    forget_before,
    ledger_reason,
    open_ledger,
    write_usage,
)
from moeless.telemetry.ledger.meter import KeyCounts, Usage, UsageMeter
from moeless.telemetry.snapshot import RuntimeSnapshot

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
_DAY_S = 86400.0
_CLOSE_TIMEOUT_S = 3.0
_MOST_UNWRITTEN = 120
"""Minutes whose usage is kept in memory while the file cannot be written to."""


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """Where usage is written down, and for how long it is kept.

    Args:
        path: The file; several servers may share it.
        keep_days: Older periods are dropped.

    Raises:
        ConfigError: Fewer than one day.
    """

    path: Path
    keep_days: int = 400

    def __post_init__(self) -> None:
        if self.keep_days < 1:
            raise ConfigError(f"the ledger keeps {self.keep_days} days; use 1 or more")


def unix_now_s() -> float:
    """Wall clock, Unix seconds."""
    return datetime.datetime.now(tz=datetime.UTC).timestamp()


class LedgerWriter:
    """Follows one server. Whatever happens to the file, serving goes on.

    Args:
        config: Where to write.
        model: Model id.
        take_keys: Counts of each API key, by its name.
        take_snapshot: State of the experts, or None while they do not answer.
        now_s: Wall clock, Unix seconds.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(
        self,
        config: LedgerConfig,
        *,
        model: str,
        take_keys: Callable[[], Mapping[str, KeyCounts]],
        take_snapshot: Callable[[], RuntimeSnapshot | None],
        now_s: Callable[[], float] = unix_now_s,
    ) -> None:
        self._config = config
        self._take_keys = take_keys
        self._take_snapshot = take_snapshot
        self._now_s = now_s
        self._meter = UsageMeter()
        self._run = uuid.uuid4().hex
        self._unwritten: dict[tuple[int, int], Usage] = {}
        self._failing = False
        self._cleaned_s = 0.0
        self._connection = open_ledger(config.path, create=True)
        snapshot = take_snapshot()
        shape = None if snapshot is None else (snapshot.num_layers, snapshot.num_experts)
        begin_run(self._connection, self._run, model, shape, now_s())
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="moeless-ledger", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Write the last usage down and close the file."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            return  # it hangs in the file system; the last second is lost
        self.write()
        try:
            end_run(self._connection, self._run, self._now_s())
            self._connection.close()
        except sqlite3.Error as exc:
            _log.warning("the ledger %s cannot be closed: %s", self._config.path, exc)

    def write(self) -> None:
        """Write down what has been used until now."""
        now_s = self._now_s()
        try:
            usage = self._meter.take(self._take_keys(), self._take_snapshot(), now_s)
            self._unwritten[usage.minute, usage.hour] = usage
            if len(self._unwritten) > _MOST_UNWRITTEN:
                del self._unwritten[min(self._unwritten)]
            for period in sorted(self._unwritten):
                write_usage(self._connection, self._run, self._unwritten[period], now_s=now_s)
                del self._unwritten[period]
            if now_s - self._cleaned_s > _DAY_S:
                self._cleaned_s = now_s
                forget_before(self._connection, now_s - self._config.keep_days * _DAY_S)
        except Exception as exc:  # noqa: BLE001 - a full disk must not end serving
            if not self._failing:
                _log.error(
                    "usage cannot be written to %s: %s", self._config.path, ledger_reason(exc)
                )
            self._failing = True
        else:
            if self._failing:
                _log.warning("usage is written to %s again", self._config.path)
            self._failing = False

    def _follow(self) -> None:
        while not self._ending.wait(_EVERY_S):
            self.write()
