"""Who may enter, and how many at once."""

import ipaddress
from typing import cast
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from moeless.server.encoding import to_response
from moeless.server.errors import ApiError, busy
from moeless.server.keys import ANYBODY, KeyRing
from moeless.server.limits import Account, KeyLimits
from moeless.server.metrics import ServerMetrics
from moeless.server.record import record_of
from moeless.server.settings import ServerSettings

_PROTECTED_PREFIXES = ("/v1/", "/moeless/")
_GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_ACCOUNT = "moeless.account"


class GateMiddleware:
    """Refuses requests without a key or from foreign web pages, and what is beyond the limits.

    ``/health``, ``/metrics`` and ``/openapi.json`` need no key: probes and scrapers have none.

    Args:
        app: The application.
        settings: Keys and limits.
        accounts: The account of each key.
        metrics: Where to count refusals.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        accounts: dict[str, Account],
        metrics: ServerMetrics,
    ) -> None:
        self._app = app
        self._refused = metrics.refused
        self._keys = KeyRing(settings.api_keys)
        self._accounts = accounts
        self._local_only = settings.local_names_only
        self._allowed_origins = frozenset(map(str.lower, settings.allow_origins))
        self._enter: ASGIApp = self._admit_and_serve
        if self._allowed_origins:
            # Outside of the keys: browsers ask without one whether they may send it.
            self._enter = CORSMiddleware(
                self._admit_and_serve,
                allow_origins=self._allowed_origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                expose_headers=("Retry-After", "X-Request-Id"),
            )
        self._limit = settings.max_concurrent
        self._generating = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._refuse_foreign_pages(scope)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        await self._enter(scope, receive, send)

    async def _admit_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            account = self._admit(scope)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        scope[_ACCOUNT] = account
        if account is None or not _generates(scope):
            await self._app(scope, receive, send)
            return
        self._generating += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._generating -= 1
            account.leave()

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused.labels(error.code).inc()
        await to_response(error)(scope, receive, send)

    def _refuse_foreign_pages(self, scope: Scope) -> None:
        """A web page of another site may make its reader's browser send us requests.

        Raises:
            ApiError: 403, the request comes from such a page that nobody has allowed to, or has
                found us by a foreign name.
        """
        host = (_header(scope, b"host") or b"").decode("latin-1").lower()
        origin = _header(scope, b"origin")
        if origin is not None and not self._is_welcome(origin.decode("latin-1").lower(), host):
            raise ApiError(
                "requests from web pages of other sites are refused: allow a site with "
                "--allow-origin",
                status=403,
                kind="permission_error",
                code="cross_origin",
            )
        if self._local_only and not _is_local_name(host):
            raise ApiError(
                "this server has no API keys and answers to localhost and addresses only: "
                "set --api-key to serve it under other names",
                status=403,
                kind="permission_error",
                code="unknown_host",
            )

    def _is_welcome(self, origin: str, host: str) -> bool:
        return origin in self._allowed_origins or _netloc(origin) == host

    def _admit(self, scope: Scope) -> Account | None:
        """The account of a request; None where none is needed. Enters it if it generates."""
        if not scope["path"].startswith(_PROTECTED_PREFIXES):
            return None
        name = self._keys.identify(_header(scope, b"authorization"))
        if name is None:
            raise _unauthorized()
        account = self._accounts[name]
        record_of(scope).key = name
        if _generates(scope):
            if self._generating >= self._limit:
                raise busy(
                    f"{self._limit} requests are in progress, the limit: try again later",
                    retry_after_s=1,
                )
            account.enter()
        return account


def open_accounts(settings: ServerSettings) -> dict[str, Account]:
    """An account for each key, by name; a single one where no key is needed."""
    keys = {key.name: key.limits or settings.key_limits for key in settings.api_keys}
    named: dict[str, KeyLimits] = keys or {ANYBODY: settings.key_limits}
    return {name: Account(name, limits) for name, limits in named.items()}


def account_of(scope: Scope) -> Account:
    """The account that a generation request was let in with."""
    return cast(Account, scope[_ACCOUNT])


def _generates(scope: Scope) -> bool:
    return scope["path"] in _GENERATING_PATHS and scope["method"] == "POST"


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_local_name(host: str) -> bool:
    """Whether a Host header names an address or localhost, which no foreign name server can."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if not name or name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for found, value in scope["headers"] if found == name), None)


def _unauthorized() -> ApiError:
    return ApiError(
        "no valid API key: send Authorization: Bearer KEY",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
