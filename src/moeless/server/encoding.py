"""JSON and server-sent events as bytes."""

import json
import math
from typing import Any

from starlette.responses import Response

from moeless.server.errors import ApiError

SSE_DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8 on one line; a lone surrogate becomes ``?``."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def to_sse(value: Any) -> bytes:
    """One server-sent event; JSON escapes line ends, so a blank line cannot split it."""
    return b"data: " + to_json(value) + b"\n\n"


def finite_logprob(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999.0 for a token that cannot occur."""
    return logprob if math.isfinite(logprob) else -9999.0


class JsonResponse(Response):
    """A response whose body is one JSON value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes of the body."""
        return to_json(content)


def to_response(error: ApiError) -> JsonResponse:
    """The HTTP response of an error."""
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)
