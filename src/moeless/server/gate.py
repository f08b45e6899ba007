"""Who may enter, and how many at once."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from moeless.server.encoding import to_response
from moeless.server.errors import ApiError, busy
from moeless.server.settings import ServerSettings

_PROTECTED_PREFIXES = ("/v1/", "/moeless/")
_GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class KeyRing:
    """Checks API keys in constant time.

    Args:
        keys: The keys; none = everybody may enter.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def admits(self, authorization: bytes | None) -> bool:
        """Whether the value of an ``Authorization`` header has one of the keys."""
        if not self._digests:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # All keys are compared, and digests are of one length: time tells nothing.
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == b"bearer"


class GateMiddleware:
    """Refuses requests without a key, and generation requests beyond the limit.

    ``/health``, ``/metrics`` and ``/openapi.json`` need no key: probes and scrapers have none.

    Args:
        app: The application.
        settings: Keys and limit.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = KeyRing(settings.api_keys)
        self._limit = settings.max_concurrent
        self._generating = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path.startswith(_PROTECTED_PREFIXES) and not self._keys.admits(_authorization(scope)):
            await to_response(_unauthorized())(scope, receive, send)
            return
        if path not in _GENERATING_PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._generating >= self._limit:
            error = busy(
                f"{self._limit} requests are in progress, the limit: try again later",
                retry_after_s=1,
            )
            await to_response(error)(scope, receive, send)
            return
        self._generating += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._generating -= 1


def _authorization(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == b"authorization"), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized() -> ApiError:
    return ApiError(
        "no valid API key: send Authorization: Bearer KEY",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
