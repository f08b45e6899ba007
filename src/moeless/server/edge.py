"""The outermost layer: request ids, counting, and the last answer to an unforeseen error."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeless.server.encoding import to_response
from moeless.server.errors import ApiError, internal_error
from moeless.server.metrics import ServerMetrics
from moeless.server.record import RequestRecord, keep_record
from moeless.server.settings import ServerSettings
from moeless.telemetry.log_format import set_request_id
from moeless.telemetry.tracing import Tracing

_KNOWN_PATHS = frozenset(
    {
        "/",
        "/dashboard",
        "/health",
        "/metrics",
        "/moeless/experts",
        "/moeless/live",
        "/openapi.json",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
    }
)
# What may be echoed and logged as it came; anything else gets an id of ours.
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)


class EdgeMiddleware:
    """Stamps, counts and never lets an exception out.

    Every path may end in a slash, and what can be got can be asked for with HEAD: probes do.

    Args:
        app: The application.
        metrics: Where to count.
        settings: How long headers may be.
        tracing: Traces a sample of the requests, or None.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        settings: ServerSettings,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        record = self._begin_record(scope)
        stamp = (b"x-request-id", record.request_id.encode())

        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], stamp]
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                # The server knows from its own scope that HEAD has no body to send.
                got = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
                await self._enter(scope)(got, receive, send_stamped)
            except Exception as exc:  # noqa: BLE001 - uvicorn would answer in plain text
                error = internal_error(exc)
                if not record.status:
                    await to_response(error)(scope, receive, send_stamped)
            finally:
                # 499 as in nginx: gone before there was a status.
                record.status = record.status or 499
                label = f"{record.status // 100}xx"
                self._metrics.http_requests.labels(record.path, label).inc()
                record.end()

    def _begin_record(self, scope: Scope) -> RequestRecord:
        method, path, headers = scope["method"], _path_label(scope["path"]), scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        known = _REQUEST_ID.fullmatch(given)
        record = RequestRecord(
            request_id=given.decode("ascii") if known else f"req-{uuid.uuid4().hex}",
            method=method,
            path=path,
        )
        set_request_id(record.request_id)
        if self._tracing is not None:
            record.trace = self._tracing.begin_request(method, path, headers)
        keep_record(scope, record)
        return record

    def _enter(self, scope: Scope) -> ASGIApp:
        """The application, or the refusal of a request whose headers are too long."""
        headers, limits = scope["headers"], self._settings
        length = len(scope["raw_path"]) + len(scope["query_string"])
        length += sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) <= limits.max_headers and length <= limits.max_head_bytes:
            return self._app
        return to_response(
            ApiError(
                f"the request has {len(headers)} headers and {length} bytes before its body: "
                f"send at most {limits.max_headers} and {limits.max_head_bytes}",
                status=431,
                code="headers_too_large",
            )
        )


def _path_label(path: str) -> str:
    """A label of few values, whatever clients ask for."""
    if path in _KNOWN_PATHS:
        return path
    if path.startswith("/dashboard/"):
        return "/dashboard"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"
