"""Events in a file, one JSON object a line: written, and read again."""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Lock

import numpy as np

from moeless.core import events
from moeless.core.events import Event, EventsLost
from moeless.errors import ConfigError, os_reason

_log = logging.getLogger(__name__)

_START = b'{"event": "'
"""How every line begins."""


class JsonlSink:
    """Appends events to a file that only its owner may read.

    A line holds the event's fields and its type under ``event``. Any thread may emit. A write
    that fails (a full disk) loses that event, and serving goes on. Lost events are counted, the
    log has a line when it begins and one when it is over, and so has the file where they would
    have been, an ``EventsLost``.

    Args:
        path: The file; created with mode 0600, and set to it if it exists.

    Raises:
        ConfigError: The file cannot be opened, or holds something else, which stays as it is.
    """

    def __init__(self, path: Path) -> None:
        try:
            is_ours = not path.exists() or path.is_file()  # a device keeps its mode
            if is_ours and not _may_continue(path):
                raise ConfigError(
                    f"cannot write events to {path}: it holds something else; name another file"
                )
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            if is_ours:
                os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write events to {path}: {os_reason(error)}; name a file in a directory "
                f"that you may write to"
            ) from error
        self._path = path
        self._descriptor: int | None = descriptor
        self._lock = Lock()
        self._lost = 0
        self._missing: EventsLost | None = None
        """What the file does not tell of yet."""
        self._torn = False

    @property
    def lost(self) -> int:
        """Events that could not be written."""
        return self._lost

    def emit(self, event: Event) -> None:
        """Write one event."""
        with self._lock:
            if self._descriptor is None:
                self._lost += 1
                return
            missing = self._missing
            try:
                self._write(self._descriptor, _line(missing) + _line(event))
            except OSError as error:
                self._lost += 1
                count = 1 if missing is None else missing.count + 1
                self._missing = EventsLost(time_s=event.time_s, model=event.model, count=count)
                if missing is None:
                    _log.error(
                        "events cannot be written to %s: %s; they are counted", self._path, error
                    )
                return
            if missing is not None:
                self._missing = None
                _log.warning(
                    "events are written to %s again; %d are lost", self._path, missing.count
                )

    def close(self) -> None:
        """Close the file; later events are lost."""
        with self._lock:
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    self._write(self._descriptor, _line(self._missing))
                os.close(self._descriptor)
                self._descriptor = None

    def _write(self, descriptor: int, lines: bytes) -> None:
        """Write whole lines, or none: what would not fit is cut off again."""
        if self._torn:
            lines = b"\n" + lines
        done = 0
        try:
            while done < len(lines):
                done += os.write(descriptor, lines[done:])
        except OSError:
            if done:
                self._torn = not _cut(descriptor, done)
            raise
        self._torn = False


def _line(event: Event | None) -> bytes:
    if event is None:
        return b""
    fields = {"event": type(event).__name__, **asdict(event)}
    return json.dumps(fields, default=_plain).encode() + b"\n"


def _cut(descriptor: int, count: int) -> bool:
    """Take the last bytes off a file; returns whether that went well."""
    try:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
    except OSError:
        return False
    return True


def _may_continue(path: Path) -> bool:
    """Whether a file is missing, empty, or begins as one of events does."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_START))
    except FileNotFoundError:
        return True
    return _START.startswith(start)


def read_events(path: Path) -> list[Event]:
    """Read what a ``JsonlSink`` wrote.

    Lines of types that are not known here, a third party's, are skipped, and so is a last line
    that was being written.

    Args:
        path: The file.

    Returns:
        The events in the order in which they were emitted.

    Raises:
        ConfigError: The file cannot be read, or a line is not an event.
    """
    try:
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as events: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            kind = getattr(events, fields.pop("event"), None)
            if isinstance(kind, type) and issubclass(kind, Event):
                make: Callable[..., Event] = kind
                found.append(make(**{name: _frozen(value) for name, value in fields.items()}))
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not an event of MoEless") from error
    return found


def _frozen(value: object) -> object:
    """JSON's lists as the tuples that they were."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _plain(value: object) -> object:
    """Numpy scalars as numbers, anything else that JSON does not know as text."""
    return value.item() if isinstance(value, np.generic) else str(value)
