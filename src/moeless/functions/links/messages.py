"""Messages between the platform's processes: JSON objects with file descriptors.

Sockets are Unix SOCK_SEQPACKET, so each message arrives whole or not at all. Nothing is ever
unpickled. Weights and activations never travel here, only through shared memory.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from moeless.errors import FunctionError

MAX_BYTES = 1 << 17
MAX_FDS = 253
"""The kernel's own limit."""

Message = dict[str, Any]


def send(sock: socket.socket, message: Message, *, fds: Sequence[int] = ()) -> None:
    """Send one message.

    Raises:
        FunctionError: The message is too large.
        OSError: The peer is gone.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES or len(fds) > MAX_FDS:
        raise FunctionError(f"message {message.get('op')!r} of {len(data)} bytes is too large")
    socket.send_fds(sock, [data], list(fds))


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one message and the descriptors that came with it.

    Returns:
        None when the peer has closed the connection.

    Raises:
        FunctionError: What arrived is not a message.
        OSError: The connection broke.
    """
    try:
        data, fds, flags, _ = socket.recv_fds(sock, MAX_BYTES, MAX_FDS)
    except ConnectionResetError:
        return None
    if not data:
        close_all(fds)
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        close_all(fds)
        raise FunctionError("received something that is not a message") from error
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not isinstance(message, dict):
        close_all(fds)
        raise FunctionError("received a message that is cut or malformed")
    return message, fds


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody has closed: such a number may be another's by now."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
