"""Bounds on connections: how many, how slow, and how long they may be idle.

This module must not know what is asked for over them.
"""

import asyncio
import http
import resource
import sys
from collections.abc import Iterable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moeless.server.encoding import to_json
from moeless.server.errors import ApiError
from moeless.server.settings import ServerSettings

_LINGER_S = 10.0
"""How long a client may read nothing of what is left for it on a connection that closes."""
_SPARE_FILES = 512
"""Descriptors that are not connections: the model's files, workers, logs."""


class ConnectionGuard:
    """Keeps the connections of one server within its limits.

    Args:
        settings: The limits.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.max_connections = _raise_file_limit(settings.max_connections)
        self._head_timeout_s = settings.head_timeout_s

    def make_room(self, connections: Iterable[Any]) -> bool:
        """See that there is room for one more beside ``connections``.

        If there is none, the one that has waited longest for its client is cut off.

        Returns:
            False if all of them are being answered.
        """
        # One that was cut off closes with nothing left to write.
        held = [each for each in connections if not _is_cut_off(each.transport)]
        if len(held) < self.max_connections:
            return True
        waiting = [each for each in held if each.waits_for_request]
        if not waiting:
            return False
        min(waiting, key=lambda each: each.quiet_since_s).transport.abort()
        return True

    def sweep(self, connections: Iterable[Any], now_s: float) -> None:
        """End connections whose client has been too slow."""
        for connection in list(connections):
            transport = connection.transport
            if transport.is_closing():
                self._sweep_closing(connection, now_s)
            elif (
                connection.waits_for_request
                and now_s - connection.quiet_since_s > self._head_timeout_s
            ):
                transport.close()

    async def watch(self, connections: set[Any]) -> None:
        """Sweep again and again until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._head_timeout_s / 2))
            self.sweep(connections, loop.time())

    def _sweep_closing(self, connection: Any, now_s: float) -> None:
        """``close`` waits for the client to read the rest; one that never does is cut off."""
        left = connection.transport.get_write_buffer_size()
        if connection.unread_bytes is None or left < connection.unread_bytes:
            connection.unread_bytes = left
            connection.quiet_since_s = now_s
        elif now_s - connection.quiet_since_s > _LINGER_S:
            connection.transport.abort()


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 whose every wait for the client has an end, and whose errors are JSON.

    Args:
        guard: Knows the limits.
        **kwargs: uvicorn's.
    """

    def __init__(self, *, guard: ConnectionGuard, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._guard = guard
        self.quiet_since_s = self.loop.time()
        self.unread_bytes: int | None = None

    @property
    def waits_for_request(self) -> bool:
        """No request is being answered; what comes counts for the next one, or is discarded."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a new connection if there is, or can be made, room for it."""
        super().connection_made(cast("asyncio.Transport", transport))
        if len(self.connections) <= self._guard.max_connections:
            return
        if not self._guard.make_room(each for each in self.connections if each is not self):
            self._answer(
                ApiError(
                    f"{self._guard.max_connections} connections are open, the limit",
                    status=503,
                    kind="service_unavailable",
                    code="too_many_connections",
                    headers={"Retry-After": "1"},
                )
            )

    def on_response_complete(self) -> None:
        """The wait for the next request begins now, however slowly its bytes come."""
        self.quiet_since_s = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's
        """Answer what is not HTTP, or too long, in OpenAI's shape."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        long = status == http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self._answer(
            ApiError(
                "the request's headers are too long" if long else "this is not a HTTP/1.1 request",
                status=status,
                code="headers_too_large" if long else "invalid_http",
            )
        )

    def _answer(self, error: ApiError) -> None:
        body = to_json(error.body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *error.headers.items(),
        ]
        reason = http.HTTPStatus(error.status).phrase.encode()
        try:
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.abort()  # another answer has begun
        else:
            self.transport.close()


def _is_cut_off(transport: asyncio.Transport) -> bool:
    return transport.is_closing() and not transport.get_write_buffer_size()


def _raise_file_limit(wanted: int) -> int:
    """Let the process have ``wanted`` connections; returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted + _SPARE_FILES:
        return wanted
    most = wanted + _SPARE_FILES
    allowed = most if hard == resource.RLIM_INFINITY else min(hard, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    return max(1, min(wanted, allowed - _SPARE_FILES))
