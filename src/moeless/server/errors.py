"""Errors in OpenAI's shape, and how the exceptions of the port become them."""

import logging
import math
import re
import traceback
from typing import Any

from moeless.errors import MoelessError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

# Workers that died are back within seconds.
_RECOVERY_S = 5.0


_PATH = re.compile(
    # Folders may hold blanks; what comes before, as in a URL or "tokens/s", does not begin a path.
    r"""(?<![\w./:~-])~?/(?:[^\s/:;,()'"<>|][^/\n:;,()'"<>|]*/)*([^\s/:;,()'"<>|]+)"""
)


def without_paths(text: str) -> str:
    """A message of the engine for clients, to whom the server's folders say too much.

    The log has them. The names of files stay.
    """
    return _PATH.sub(r"\1", text)


class ApiError(MoelessError):
    """What an HTTP client is told when its request fails.

    Args:
        message: One line for the caller.
        code: A short machine-readable reason, which stays the same whatever the message says.
        status: HTTP status.
        kind: OpenAI's ``type``.
        param: The offending field as a path, for example ``messages[0].content``.
        headers: Extra response headers.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object that stands for this error."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class ClientGoneError(MoelessError):
    """The client closed the connection before it had its answer."""


def busy(message: str, *, retry_after_s: float) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="queue_full",
        headers=_retry_after(retry_after_s),
    )


def rate_limited(message: str, *, retry_after_s: float) -> ApiError:
    """A 429 for a client that has used what it may."""
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers=_retry_after(retry_after_s),
    )


def unavailable(message: str, *, code: str, retry_after_s: float | None = None) -> ApiError:
    """A 503: the server cannot answer now."""
    headers = None if retry_after_s is None else _retry_after(retry_after_s)
    return ApiError(message, status=503, kind="service_unavailable", code=code, headers=headers)


def engine_unavailable(message: str) -> ApiError:
    """A 503: the engine, or what it computes on, is down and may come back."""
    return unavailable(
        without_paths(message), code="engine_unavailable", retry_after_s=_RECOVERY_S
    )


def engine_failed(message: str) -> ApiError:
    """A 500: the engine accepted the request and then failed."""
    return ApiError(without_paths(message), status=500, kind="server_error", code="engine_error")


def context_exceeded(message: str, *, param: str) -> ApiError:
    """A 400: prompt and completion do not fit into the model's context."""
    return ApiError(message, param=param, code="context_length_exceeded")


def from_engine(exc: MoelessError, *, prompt_param: str) -> ApiError:
    """Translate what the engine raised when a request was handed to it.

    Args:
        exc: The port's exception.
        prompt_param: How this endpoint calls its prompt: ``prompt`` or ``messages``.
    """
    if isinstance(exc, RequestError):
        param = prompt_param if exc.param in {None, "prompt", "prompt_ids"} else exc.param
        return ApiError(without_paths(str(exc)), param=param, code=exc.code or "invalid_value")
    if isinstance(exc, QueueFullError):
        return busy(str(exc), retry_after_s=exc.retry_after_s)
    return engine_unavailable(f"the engine is not available: {exc}")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def internal_error(exc: Exception) -> ApiError:
    """A 500 for an error that is a fault of the server.

    Logs the frames but not the exception's message, which may quote a prompt.
    """
    frames = "".join(traceback.format_tb(exc.__traceback__))
    logger.error("unexpected %s\n%s", type(exc).__name__, frames)
    return ApiError(
        "internal error: the server's log has the details",
        status=500,
        kind="server_error",
        code="internal_error",
    )
