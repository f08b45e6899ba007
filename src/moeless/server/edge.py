"""The outermost layer: request ids, counting, and the last answer to an unforeseen error."""

import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeless.server.encoding import to_response
from moeless.server.errors import ApiError, internal_error
from moeless.server.metrics import ServerMetrics
from moeless.server.settings import ServerSettings

_KNOWN_PATHS = frozenset(
    {
        "/health",
        "/metrics",
        "/moeless/experts",
        "/openapi.json",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
    }
)
ARRIVED_S = "moeless.arrived_s"


class EdgeMiddleware:
    """Stamps, counts and never lets an exception out.

    Args:
        app: The application.
        metrics: Where to count.
        settings: How long headers may be.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, settings: ServerSettings) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVED_S] = time.perf_counter()
        request_id = f"req-{uuid.uuid4().hex}".encode()
        status = 0

        async def send_stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                await self._enter(scope)(scope, receive, send_stamped)
            except Exception as exc:  # noqa: BLE001 - uvicorn would answer in plain text
                error = internal_error(exc)
                if not status:
                    await to_response(error)(scope, receive, send_stamped)
            finally:
                # 499 as in nginx: gone before there was a status.
                label = f"{(status or 499) // 100}xx"
                self._metrics.http_requests.labels(_path_label(scope["path"]), label).inc()

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
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"
