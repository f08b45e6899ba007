"""What is known of one HTTP request; filled in on its way, read at its end."""

import logging
import time
from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

from moeless.telemetry.log_format import with_fields
from moeless.telemetry.tracing import RequestTrace

_RECORD = "moeless.record"
# Asked for again and again by machines.
_ROUTINE = frozenset({"/health", "/metrics", "/moeless/live", "/dashboard"})
_log = logging.getLogger("moeless.requests")


@dataclass(kw_only=True)
class RequestRecord:
    """One request.

    Args:
        request_id: The client's own ``X-Request-Id``, or one made up.
        method: HTTP method.
        path: Label of the endpoint, of few values.
        trace: Its trace, if it is traced.
        arrived_s: When it arrived, on ``time.perf_counter``.
    """

    request_id: str
    method: str
    path: str
    trace: RequestTrace | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    key: str | None = None
    answer_id: str | None = None
    outcome: str | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None

    def end(self) -> None:
        """Log the request and end its trace."""
        fields: dict[str, object] = {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_ms": _since_ms(self.arrived_s, time.perf_counter()),
        }
        if self.key is not None:
            fields["key"] = self.key
        if self.answer_id is not None:
            fields |= {
                "answer_id": self.answer_id,
                "outcome": self.outcome,
                "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.generated_tokens,
            }
        if self.first_token_s is not None:
            fields["first_token_ms"] = _since_ms(self.arrived_s, self.first_token_s)
        level = logging.DEBUG if self.path in _ROUTINE else logging.INFO
        _log.log(level, "request", extra=with_fields(**fields))
        if self.trace is not None:
            self.trace.end(status=self.status, fields=fields)


def keep_record(scope: Scope, record: RequestRecord) -> None:
    """Let the layers below find the record."""
    scope[_RECORD] = record


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request of ``scope``."""
    return cast(RequestRecord, scope[_RECORD])


def _since_ms(start_s: float, end_s: float) -> float:
    return round(1000 * (end_s - start_s), 3)
