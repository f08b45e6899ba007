"""How an engine attaches to a supervisor process. A ``links.client.PlatformClient``."""

import itertools
import select
import socket
import threading
import time
from pathlib import Path

from moeless.core.checkpoint import ExpertLayout
from moeless.core.model import ModelSpec
from moeless.errors import FunctionError, UnavailableError, os_reason
from moeless.functions.links import shared_memory
from moeless.functions.links.board import Board
from moeless.functions.links.channel import ChannelShape, Mailbox, ring
from moeless.functions.links.client import Report, describe_wait
from moeless.functions.links.messages import Message, close_all, receive, send
from moeless.functions.links.wire import layout_to_json, spec_to_json
from moeless.functions.supervisor.config import WorkerConfig


class SupervisorClient:
    """One engine's attachment.

    Args:
        socket_path: The supervisor's socket.
        spec: The model.
        layout: Where its expert weights are.
        directory: The checkpoint.
        shape: Sizes of the channel.
        lookahead: Prediction distance d of the engine's forecasts; 0 for none.
        wishes: Further fields of the attach request: ``policy``, and those of ``wishes``.
        timeout_s: How long attaching may take, workers' start included.

    Raises:
        FunctionError: The supervisor refuses; the message says why.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        spec: ModelSpec,
        layout: ExpertLayout,
        directory: Path,
        shape: ChannelShape,
        lookahead: int,
        wishes: Message | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._connection = _connect(socket_path, timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._demanded: dict[int, str | None] = {}
        self._waits_for: tuple[int, list[int]] = (0, [])
        self._reports: list[Report] = []
        send(
            self._connection,
            {
                "op": "attach",
                "spec": spec_to_json(spec),
                "layout": layout_to_json(layout),
                "directory": str(directory.resolve()),
                "shape": shape.to_json(),
                "lookahead": lookahead,
                **(wishes or {}),
            },
        )
        try:
            message, fds = _await_attachment(self._connection, timeout_s=timeout_s)
        except BaseException:
            self._connection.close()
            raise
        self.workers = tuple(
            worker and WorkerConfig(**{**worker, "cores": tuple(worker["cores"])})
            for worker in message["workers"]
        )
        """By device, None for one that is not there; devices may join and leave later."""
        self._num_devices = len(self.workers)
        self._function_bytes = int(message["function_bytes"])
        self._wants_loads = bool(message["wants_loads"])
        self._load_bell = fds[3]
        self._closed = False
        self._board = Board(
            shared_memory.attach(fds[0], write=False),
            shared_memory.attach(fds[1]),
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            num_devices=self._num_devices,
        )
        self.payload_region = shared_memory.attach(fds[2])
        self.mailboxes = [Mailbox(shared_memory.attach(fd), shape) for fd in fds[4::3]]
        self.request_bells = fds[5::3]
        self.answer_bells = fds[6::3]
        close_all([*fds[:3], *fds[4::3]])

    @property
    def board(self) -> Board:
        """The shared arrays."""
        return self._board

    @property
    def num_devices(self) -> int:
        """D."""
        return self._num_devices

    @property
    def function_bytes(self) -> int:
        """Bytes of one instance."""
        return self._function_bytes

    @property
    def wants_loads(self) -> bool:
        """Whether plans follow loads; False where they are fixed."""
        return self._wants_loads

    def announce_loads(self) -> None:
        """Loads on the board are new; never blocks."""
        ring(self._load_bell)

    def demand(self, *, layer: int, experts: list[int]) -> int:
        """Ask for experts without a warm replica; returns a ticket at once."""
        ticket = next(self._tickets)
        self._waits_for = layer, experts
        self._send({"op": "demand", "ticket": ticket, "layer": layer, "experts": experts})
        return ticket

    def await_demand(self, ticket: int, *, timeout_s: float) -> None:
        """Wait until the demanded experts are warm.

        Raises:
            UnavailableError: An expert cannot be made warm anywhere, or it took too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if ticket in self._demanded:
                    error = self._demanded.pop(ticket)
                    break
                self._receive_one(0.02)
            time.sleep(0)  # let a report have its turn
            if time.monotonic() > deadline_s:
                raise UnavailableError(describe_wait(*self._waits_for, timeout_s))
        if error is not None:
            raise UnavailableError(error)

    def doubt(self, device: int, *, allowed_s: float, waited_s: float) -> None:
        """Tokens have waited for a device for a while: it may have stopped.

        The supervisor finds out, and replaces it before its work is repeated.

        Args:
            device: Which.
            allowed_s: How long it may take for what it was sent.
            waited_s: How long they have waited.
        """
        wait = {"allowed_s": allowed_s, "waited_s": waited_s}
        self._send({"op": "doubt", "device": device, **wait})

    def check_alive(self) -> None:
        """Look whether the supervisor is still there. May be called from any thread.

        Raises:
            FunctionError: It is gone, and its workers with it.
        """
        poller = select.poll()
        if self._connection.fileno() >= 0:
            poller.register(self._connection, 0)  # a hang-up is reported unasked
        if self._connection.fileno() < 0 or poller.poll(0):
            raise FunctionError("the supervisor is gone")

    def report(self) -> Report:
        """Counters of the platform. May be called from any thread."""
        deadline_s = time.monotonic() + 5.0
        with self._lock:
            self._reports.clear()
            self._send({"op": "report"})
            while not self._reports:
                self._receive_one(0.1)
                if time.monotonic() > deadline_s:
                    raise FunctionError("the supervisor does not answer")
            return self._reports.pop()

    def close(self) -> None:
        """Leave the platform; once more does nothing: others may have the descriptors by then."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        close_all([self._load_bell, *self.request_bells, *self.answer_bells])

    def _send(self, message: Message) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise FunctionError("the supervisor is gone") from error

    def _receive_one(self, timeout_s: float) -> None:
        """Take one message if one comes in time; the caller holds the lock."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return
        try:
            received = receive(self._connection)
        except OSError as error:
            raise FunctionError("the supervisor is gone") from error
        if received is None:
            raise FunctionError("the supervisor is gone")
        message, fds = received
        close_all(fds)
        if message["op"] == "demanded":
            self._demanded[int(message["ticket"])] = message["error"]
        elif message["op"] == "report":
            self._reports.append(message)


def _await_attachment(connection: socket.socket, *, timeout_s: float) -> tuple[Message, list[int]]:
    connection.settimeout(timeout_s)
    try:
        received = receive(connection)
    except TimeoutError as error:
        raise FunctionError(f"workers were not ready within {timeout_s:g} s") from error
    if received is None:
        raise FunctionError("the supervisor ended before the workers were ready")
    message, fds = received
    if message["op"] != "attached":
        close_all(fds)
        raise FunctionError(message.get("error", "the supervisor refused the engine"))
    connection.settimeout(None)
    return message, fds


def _connect(socket_path: str, *, timeout_s: float) -> socket.socket:
    """Connect as soon as the supervisor listens."""
    deadline_s = time.monotonic() + min(timeout_s, 30.0)
    pause = threading.Event()
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(socket_path)
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline_s:
                raise FunctionError(
                    f"no supervisor listens on {socket_path}: {os_reason(error)}"
                ) from error
            pause.wait(0.01)
        else:
            return connection
