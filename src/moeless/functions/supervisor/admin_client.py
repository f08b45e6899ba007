"""An operator's connection to the admin socket of a pool."""

import socket
from pathlib import Path
from typing import Any

from moeless.errors import ConfigError, FunctionError, os_reason
from moeless.functions.links.messages import Message, close_all, receive, send


class AdminClient:
    """Asks about the devices of a pool.

    Args:
        path: The admin socket.
        timeout_s: How long an answer may take.

    Raises:
        FunctionError: Nobody listens there.
    """

    def __init__(self, path: Path, *, timeout_s: float = 30.0) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout_s)
        try:
            self._connection.connect(str(path))
        except OSError as error:
            self._connection.close()
            raise FunctionError(f"no pool answers on {path}: {os_reason(error)}") from error

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def list_devices(self) -> list[dict[str, Any]]:
        """All slots for devices, as ``Devices.describe`` has them."""
        devices: list[dict[str, Any]] = self.ask({"op": "list"})["devices"]
        return devices

    def list_models(self) -> list[dict[str, Any]]:
        """All models, as ``HostedModels.describe`` has them."""
        models: list[dict[str, Any]] = self.ask({"op": "models"})["models"]
        return models

    def add(
        self, kind: str, *, budget_bytes: int | None = None, cores: tuple[int, ...] = ()
    ) -> int:
        """Start another device; returns its number, before it has joined."""
        request = {"op": "add", "kind": kind, "budget_bytes": budget_bytes, "cores": list(cores)}
        return int(self.ask(request)["device"])

    def drain(self, device: int) -> None:
        """Begin to drain a device."""
        self.ask({"op": "drain", "device": device})

    def keep(self, device: int) -> None:
        """Take back that a device is drained."""
        self.ask({"op": "keep", "device": device})

    def set_budget(self, device: int, num_bytes: int) -> None:
        """Give a device another budget."""
        self.ask({"op": "budget", "device": device, "budget_bytes": num_bytes})

    def ask(self, message: Message) -> Message:
        """Send one request and wait for its answer.

        Raises:
            ConfigError: It was refused because something in it is wrong.
            FunctionError: It was refused for another reason, or the pool is gone.
        """
        try:
            send(self._connection, message)
            received = receive(self._connection)
        except OSError as error:
            raise FunctionError(f"the pool does not answer: {os_reason(error)}") from error
        if received is None:
            raise FunctionError("the pool has hung up")
        answer, fds = received
        close_all(fds)
        if answer.get("op") == "done":
            return answer
        error_type = ConfigError if answer.get("exit_code") == ConfigError.exit_code else None
        raise (error_type or FunctionError)(str(answer.get("error", "the pool has refused")))
