"""Binding, announcing and ending the server."""

import asyncio
import contextlib
import errno
import functools
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from moeless.errors import ConfigError, os_reason
from moeless.server.connections import ConnectionGuard, GuardedProtocol
from moeless.server.state import ServerState

# After open requests are cut, this long until uvicorn cancels their tasks.
_CUT_S = 2.0
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where the server listens.

    Args:
        host: As given by the caller.
        port: The real port, also where the caller gave 0.
    """

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base of all addresses, without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class HttpServer(uvicorn.Server):
    """uvicorn that announces itself and cuts open streams when it has to go.

    Args:
        app: Made by :func:`moeless.server.create_app`.
        listener: Bound socket.
        address: Where ``listener`` is bound.
        on_ready: Told the address once requests are accepted.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        address: ServerAddress,
        on_ready: Callable[[ServerAddress], None],
    ) -> None:
        self._state: ServerState = app.state.moeless
        self._listener = listener
        self._address = address
        self._on_ready = on_ready
        settings = self._state.settings
        self._guard = ConnectionGuard(settings)
        self._watching: asyncio.Task[None] | None = None
        self.ended_by = 0
        """The signal that has ended it, 0 for none."""
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(
                    "type[asyncio.Protocol]",
                    functools.partial(GuardedProtocol, guard=self._guard),
                ),
                ws="none",
                h11_max_incomplete_event_size=settings.max_head_bytes,
                # Logging belongs to the program, not to the server.
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=math.ceil(settings.drain_s + _CUT_S),
            )
        )

    def serve_forever(self) -> None:
        """Block until a signal, or until ``should_exit`` is set."""
        self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, then say so."""
        await super().startup(sockets)
        connections = cast("set[Any]", self.server_state.connections)
        self._watching = asyncio.create_task(self._guard.watch(connections))
        if self.started:
            self._on_ready(self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let open ones go on for a moment, then cut them."""
        loop = asyncio.get_running_loop()
        cutting = loop.call_later(self._state.settings.drain_s, self._state.cut.set)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            if self._watching is not None:
                self._watching.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was served is not raised once more.

        uvicorn's would kill the process before its caller could end the workers.
        """
        with super().capture_signals():
            yield
            self.ended_by = next(iter(self._captured_signals), 0)
            self._captured_signals.clear()


def run_server(
    app: FastAPI,
    host: str,
    port: int,
    on_ready: Callable[[ServerAddress], None] = lambda _: None,
) -> int:
    """Serve ``app`` until SIGTERM or SIGINT; then return within seconds.

    Args:
        app: Made by :func:`moeless.server.create_app`.
        host: Name or address to listen at.
        port: 0 for any free port.
        on_ready: Told the real address once requests are accepted.

    Returns:
        The signal.

    Raises:
        ConfigError: The address cannot be bound.
    """
    listener = bind(host, port)
    with listener:
        address = ServerAddress(host=host, port=listener.getsockname()[1])
        server = HttpServer(app, listener, address, on_ready)
        server.serve_forever()
        return server.ended_by


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that listens, though nobody accepts yet.

    Raises:
        ConfigError: The address is unknown, in use or not allowed.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} does not exist: use --port with 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"host {host!r} is unknown: use --host with an address") from None
    family, kind, protocol, _, location = found[0]
    listener = socket.socket(family, kind, protocol)
    # A port whose last connections are still closing may be bound again.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(location)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(_explain(exc, host, port, location)) from None
    listener.setblocking(False)
    return listener


def _explain(exc: OSError, host: str, port: int, location: Any) -> str:
    if exc.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: stop what listens there, or use --port"
    if exc.errno == errno.EACCES:
        return f"port {port} needs privileges: use --port with 1024 or more"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"host {location[0]} is not an address of this machine: use --host"
    return f"cannot listen at {host} port {port}: {os_reason(exc)}"
