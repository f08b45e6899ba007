"""Writes a server's usage down once a second, on a thread of its own."""

import datetime
import logging
import sqlite3
import threading
import time
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
    write_gap,
    write_usage,
)
from moeless.telemetry.ledger.meter import KeyCounts, Usage, UsageMeter
from moeless.telemetry.ledger.steady_clock import SteadyClock
from moeless.telemetry.snapshot import RuntimeSnapshot

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
_DAY_S = 86400.0
_CLOSE_TIMEOUT_S = 3.0
_HOUR_S = 3600.0
_MOST_FORGOTTEN_S = 2 * _DAY_S
"""Usage that is dropped at once, and in an hour, however old the clock says it is."""
_BACK_S = 120.0
"""A clock that is back by more has been put right after it was ahead for long."""
_MOST_UNWRITTEN = 120
"""Minutes whose usage is kept in memory while the file cannot be written to."""


@dataclass(kw_only=True)
class _Gap:
    """Minutes of a run that were given up, which the file does not tell of yet."""

    first_s: int
    last_s: int
    minutes: int = 1


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
        on_lost: Told when the usage of a minute is given up, because the file could not be
            written to for too long.
        now_s: Wall clock, Unix seconds.
        monotonic_s: Monotonic clock, seconds.

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
        on_lost: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = unix_now_s,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._take_keys = take_keys
        self._take_snapshot = take_snapshot
        self._on_lost = on_lost
        self._clock = SteadyClock(now_s, monotonic_s)
        self._monotonic_s = monotonic_s
        self._meter = UsageMeter()
        self._unwritten: dict[tuple[str, int, int], Usage] = {}
        self._gaps: dict[str, _Gap] = {}
        self._failing = False
        self._clean_at_s = 0.0
        self._connection = open_ledger(config.path, create=True)
        snapshot = take_snapshot()
        self._model = model
        self._shape = None if snapshot is None else (snapshot.num_layers, snapshot.num_experts)
        self._last_s = self._clock.now_s()
        self._run = self._begin_run(self._last_s)
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
            end_run(self._connection, self._run, self._clock.now_s())
            self._connection.close()
        except sqlite3.Error as exc:
            _log.warning("the ledger %s cannot be closed: %s", self._config.path, exc)

    def write(self) -> None:
        """Write down what has been used until now."""
        now_s = self._clock.now_s()
        try:
            if now_s < self._last_s - _BACK_S:
                # Its periods may be those of rows that are there: a run of its own replaces none.
                end_run(self._connection, self._run, self._last_s)
                self._run = self._begin_run(now_s)
                self._meter.begin_anew()
            self._last_s = now_s
            usage = self._meter.take(self._take_keys(), self._take_snapshot(), now_s)
            self._unwritten[self._run, usage.minute, usage.hour] = usage
            if len(self._unwritten) > _MOST_UNWRITTEN:
                self._give_up(next(iter(self._unwritten)))
            for period in list(self._unwritten):
                write_usage(self._connection, period[0], self._unwritten[period], now_s=now_s)
                del self._unwritten[period]
            for run, gap in list(self._gaps.items()):
                write_gap(
                    self._connection,
                    run,
                    first_s=gap.first_s,
                    last_s=gap.last_s,
                    minutes=gap.minutes,
                )
                del self._gaps[run]
            self._forget(now_s)
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

    def _begin_run(self, now_s: float) -> str:
        run = uuid.uuid4().hex
        begin_run(self._connection, run, self._model, self._shape, now_s)
        return run

    def _give_up(self, period: tuple[str, int, int]) -> None:
        """The file cannot be written to for so long that memory has to be given back."""
        run, minute, _ = period
        del self._unwritten[period]
        gap = self._gaps.get(run)
        if gap is None:
            _log.error(
                "usage could not be written to %s for %d minutes: older usage is lost",
                self._config.path,
                _MOST_UNWRITTEN,
            )
            self._gaps[run] = _Gap(first_s=minute, last_s=minute)
        else:
            gap.last_s, gap.minutes = minute, gap.minutes + 1
        self._on_lost()

    def _forget(self, now_s: float) -> None:
        """Drop old usage, a bounded part of it at once, and nothing on account of a jump."""
        at_s = self._monotonic_s()
        if at_s < self._clean_at_s or not self._clock.has_stood:
            return
        limit_s = now_s - self._config.keep_days * _DAY_S
        more = forget_before(self._connection, limit_s, most_s=_MOST_FORGOTTEN_S)
        self._clean_at_s = at_s + (_HOUR_S if more else _DAY_S)

    def _follow(self) -> None:
        while not self._ending.wait(_EVERY_S):
            self.write()
