"""The admin socket: an operator's requests about devices, and their answers.

Only processes of the same user are heard. Each request is one message and gets one answer; nothing
that is asked here, or asked wrongly, may hold up or end the supervisor.
"""

import contextlib
import os
import selectors
import socket
import stat
from pathlib import Path
from typing import Any

from moeless.errors import ConfigError, FunctionError, MoelessError, os_reason
from moeless.functions.links.messages import Message, close_all, peer_uid, receive, send
from moeless.functions.supervisor.devices import Devices
from moeless.functions.supervisor.models import HostedModels

_MOST_CONNECTIONS = 16
_MOST_BYTES = 1 << 60


class AdminDesk:
    """Answers operators.

    Args:
        path: Where its socket is made, mode 0600.
        selector: Wakes the supervisor's loop; data is what to call.
        devices: What operators ask about.
        models: What else.
    """

    def __init__(
        self,
        path: Path,
        *,
        selector: selectors.BaseSelector,
        devices: Devices,
        models: HostedModels,
    ) -> None:
        self._path = path
        self._selector = selector
        self._devices = devices
        self._models = models
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._answers = {
            "list": self._list,
            "models": self._list_models,
            "add": self._add,
            "drain": self._drain,
            "keep": self._keep,
            "budget": self._set_budget,
        }

    def open(self) -> None:
        """Begin to listen.

        Raises:
            ConfigError: The socket cannot be made.
        """
        listener = listen(self._path)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._listener = listener

    def close(self) -> None:
        """Hang up and take the socket away."""
        for connection in list(self._connections):
            self._hang_up(connection)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has hung up already, or no descriptor is left
            return
        if peer_uid(connection) != os.getuid() or len(self._connections) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: socket.socket) -> None:
        if connection not in self._connections:
            return
        try:
            received = receive(connection)
        except BlockingIOError:
            return
        except (OSError, FunctionError):
            received = None
        if received is None:
            self._hang_up(connection)
            return
        message, fds = received
        close_all(fds)
        try:
            # One that does not take its answers is not waited for.
            send(connection, self._answer(message))
        except (OSError, FunctionError):
            self._hang_up(connection)

    def _answer(self, message: Message) -> Message:
        operation = message.get("op")
        answer = self._answers.get(operation) if isinstance(operation, str) else None
        if answer is None:
            return _refusal(ConfigError(f"unknown request {str(operation)[:40]!r}"))
        try:
            return {"op": "done", **answer(message)}
        except MoelessError as error:
            return _refusal(error)

    def _hang_up(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _list(self, _message: Message) -> Message:
        return {"devices": self._devices.describe()}

    def _list_models(self, _message: Message) -> Message:
        return {"models": self._models.describe()}

    def _add(self, message: Message) -> Message:
        kind, cores = message.get("kind"), message.get("cores", [])
        budget = message.get("budget_bytes")
        if not isinstance(kind, str) or not isinstance(cores, list):
            raise ConfigError("malformed request: kind is a name, cores are a list")
        device = self._devices.add(
            kind[:40],
            budget_bytes=None if budget is None else _number(message, "budget_bytes", least=1),
            cores=[_whole(core) for core in cores],
        )
        return {"device": device}

    def _drain(self, message: Message) -> Message:
        device = _number(message, "device")
        self._devices.drain(device)
        return {"device": device}

    def _keep(self, message: Message) -> Message:
        device = _number(message, "device")
        self._devices.keep(device)
        return {"device": device}

    def _set_budget(self, message: Message) -> Message:
        device = _number(message, "device")
        self._devices.set_budget(device, _number(message, "budget_bytes", least=1))
        return {"device": device}


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner can reach.

    Raises:
        ConfigError: It cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old_mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {os_reason(error)}") from error
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.listen(16)
    return listener


def _refusal(error: MoelessError) -> Message:
    return {"op": "refused", "error": str(error), "exit_code": error.exit_code}


def _number(message: Message, name: str, *, least: int = 0) -> int:
    value = _whole(message.get(name))
    if not least <= value <= _MOST_BYTES:
        raise ConfigError(f"{name} is {value}; use {least} to {_MOST_BYTES}")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"malformed request: {str(value)[:40]!r} is not a whole number")
    return value
