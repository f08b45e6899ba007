"""How log lines look: for people, or one JSON object a line. No prompt gets into either.

An exception that is not our own may quote what it was given, a prompt for example, so of those
only the type and the frames are written.
"""

import contextvars
import datetime
import json
import logging
import sys
import traceback
from types import TracebackType
from typing import Any, Literal

from moeless.errors import MoelessError

LogFormat = Literal["text", "json"]

_ExcInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)

_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "moeless_request_id", default=None
)


def set_request_id(request_id: str) -> None:
    """Name the request that the current task serves; its log lines carry it."""
    _request_id.set(request_id)


def with_fields(**fields: Any) -> dict[str, Any]:
    """The ``extra`` of a log call whose line shall have these fields."""
    return {"fields": fields}


class _Formatter(logging.Formatter):
    def formatException(self, ei: _ExcInfo) -> str:
        """Frames and types; messages of our own errors and of the operating system only."""
        return "" if ei[1] is None else _describe(ei[1])

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        """What a line has besides its message."""
        request_id = _request_id.get()
        named = {} if request_id is None else {"request_id": request_id}
        return named | dict(getattr(record, "fields", {}))

    def time_of(self, record: logging.LogRecord) -> str:
        """When it happened, UTC."""
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(_Formatter):
    """One line for people; further lines for exceptions."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        fields = "".join(f" {name}={value}" for name, value in self.fields_of(record).items())
        line = (
            f"{self.time_of(record)} {record.levelname} {record.name}: "
            f"{record.getMessage()}{fields}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(_Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``, further fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line = {
            "time": self.time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(log_format: LogFormat = "text", level: str = "warning") -> None:
    """Have all loggers of this process write to stderr in one format.

    Args:
        log_format: For people or for machines.
        level: The least important level that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def format_in_use() -> LogFormat:
    """How this process logs, so that those that it starts can do the same."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(h.formatter, JsonFormatter) for h in handlers) else "text"


def _describe(error: BaseException) -> str:
    parts = []
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        parts.append(_describe(earlier) + "\n\n")
    if error.__traceback__ is not None:
        parts += traceback.format_tb(error.__traceback__)
    told = isinstance(error, MoelessError | OSError) and str(error)
    parts.append(type(error).__name__ + (f": {error}" if told else ""))
    return "".join(parts)
