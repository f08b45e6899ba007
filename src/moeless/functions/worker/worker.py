"""The two loops of a worker: invocations of engines, and orders of the supervisor.

Orders (load, evict, attach) are carried out in order by a thread of their own, so that a load does
not hold up invocations of instances that are warm. Another thread receives them, and a third one
has the disk deliver what is to be loaded next.
"""

import contextlib
import logging
import mmap
import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from moeless.core.model import FunctionId
from moeless.errors import CheckpointError, MoelessError
from moeless.functions.host.host import ExpertHost
from moeless.functions.host.order_queue import OrderQueue
from moeless.functions.links import shared_memory
from moeless.functions.links.channel import ChannelShape, Mailbox, hush, new_doorbell, ring
from moeless.functions.links.messages import Message, close_all, receive, send
from moeless.functions.links.payload import Payload
from moeless.functions.links.pulse import Pulse
from moeless.functions.links.segment_status import FAILED
from moeless.functions.links.wire import layout_from_json, spec_from_json
from moeless.functions.store.store import ExpertStore
from moeless.functions.worker.fetcher import Fetcher

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Engine:
    model: str
    payload: Payload
    mailbox: Mailbox
    regions: tuple[mmap.mmap, mmap.mmap]
    request_bell: int
    answer_bell: int
    seen: int


class Worker:
    """One device's process.

    Args:
        connection: To the supervisor.
        device: A torch device name.
        spin_s: How long to look for the next invocation before sleeping.
        pulse: Where it shows whom it serves.
    """

    def __init__(
        self, connection: socket.socket, *, device: str, spin_s: float, pulse: Pulse
    ) -> None:
        self._connection = connection
        self._pulse = pulse
        self._host = ExpertHost(device)
        self._spin_s = spin_s
        self._engines: dict[int, _Engine] = {}
        self._changed_bell = new_doorbell()
        self._changed = True
        self._to_close: list[int] = []
        self._has_served = False
        self._orders: OrderQueue[tuple[Message, list[int]]] = OrderQueue(self)
        self._fetcher = Fetcher(self._host.fetch)

    def run(self) -> None:
        """Serve until the supervisor closes the connection."""
        threading.Thread(target=self._receive_orders, name="receiver", daemon=True).start()
        self._fetcher.start()
        threading.Thread(target=self._follow_orders, name="orders", daemon=True).start()
        with contextlib.suppress(OSError):  # the other thread notices that nobody is there
            send(self._connection, {"op": "ready", "pid": os.getpid()})
        self._serve_invocations()

    # Invocations

    def _serve_invocations(self) -> None:
        poller = select.poll()
        bells: set[int] = set()
        while True:
            if self._changed:
                self._changed = False
                hush(self._changed_bell)
                for bell in bells:
                    poller.unregister(bell)
                bells = {e.request_bell for e in self._engines.values()} | {self._changed_bell}
                closing, self._to_close = self._to_close, []
                close_all(closing)
                for bell in bells:
                    poller.register(bell, select.POLLIN)
            engines = list(self._engines.items())
            served = False
            for number, engine in engines:
                if engine.mailbox.requested != engine.seen:
                    self._pulse.serve(number)
                    self._serve(engine)
                    self._pulse.serve(None)
                    served = True
            if served or self._look(engines):
                continue
            for fd, _ in poller.poll():
                hush(fd)

    def _look(self, engines: list[tuple[int, _Engine]]) -> bool:
        """Watch the mailboxes for a moment; whether something came."""
        if self._spin_s <= 0:
            return False
        until_s = time.monotonic() + self._spin_s
        while time.monotonic() < until_s:
            if any(e.mailbox.requested != e.seen for _, e in engines):
                return True
        return False

    def _serve(self, engine: _Engine) -> None:
        seq, layer, rows, n = engine.mailbox.request()
        engine.seen = seq
        busy_ns = self._host.invoke(
            engine.model,
            layer,
            x_TH=engine.payload.x_TH[:rows],
            token_S=engine.payload.token_S,
            segments_n3=engine.mailbox.segments_n3[:n],
            y_SH=engine.payload.y_SH,
            status_n=engine.mailbox.status_n[:n],
        )
        if (engine.mailbox.status_n[:n] == FAILED).any():
            if self._has_served:
                # What it could do before it cannot any more, for lack of memory as a rule: a
                # successor begins afresh, and meanwhile the rows are computed elsewhere.
                _log.error("an invocation failed that worked before; this worker ends")
                os._exit(1)
        else:
            self._has_served = True
        engine.mailbox.answer(seq, busy_ns=busy_ns)
        ring(engine.answer_bell)

    # Orders

    def rest(self) -> None:
        """No load follows for now."""
        self._host.rest()

    def _receive_orders(self) -> None:
        while True:
            received = None
            try:
                with contextlib.suppress(OSError):
                    received = receive(self._connection)
                if received is None:
                    os._exit(0)  # the supervisor is gone: nothing is left to do or to save
                message, _ = received
                if message["op"] == "load":
                    self._expect(_functions(message))
                self._orders.put(received)
            except Exception:  # noqa: BLE001 - as below
                _log.exception("an order could not be received")
                os._exit(1)

    def _expect(self, functions: list[FunctionId]) -> None:
        """Loads have been ordered, others may be before them."""
        small = []
        for function in functions:
            if self._host.should_fetch(function):
                self._fetcher.expect(function)
            else:
                small.append(function)
        self._host.expect(small)

    def _follow_orders(self) -> None:
        orders = {
            "model": self._add_model,
            "load": self._load,
            "evict": self._evict,
            "attach": self._attach,
            "detach": self._detach,
        }
        while True:
            message, fds = self._orders.take()
            try:
                orders[message["op"]](message, fds)
            except Exception:  # noqa: BLE001 - a worker that cannot follow orders must end,
                _log.exception("order %r failed", message.get("op"))  # so that it is replaced
                os._exit(1)

    def _add_model(self, message: Message, fds: list[int]) -> None:
        close_all(fds)
        reply: Message = {"op": "model", "model": message["model"]}
        try:
            spec = spec_from_json(message["spec"])
            layout = layout_from_json(message["layout"])
            store = ExpertStore(Path(message["directory"]), layout, spec)
            reply["function_bytes"] = self._host.add_model(store, spec)
        except MoelessError as error:
            reply["error"] = str(error)
        self._reply(reply)

    def _load(self, message: Message, fds: list[int]) -> None:
        close_all(fds)
        loaded = []
        for function, digest in zip(_functions(message), message["digests"], strict=True):
            try:
                self._fetcher.settle(function)
                self._host.load(function, digest=digest)
                loaded.append(function)
            except MoelessError as error:
                # Damaged files are the same for all devices, memory is not.
                elsewhere = not isinstance(error, CheckpointError)
                failure = {"function": function, "reason": str(error), "elsewhere": elsewhere}
                self._report("failed", failure)
        if loaded:
            digests = [self._host.digest(function) for function in loaded]
            self._report("loaded", {"functions": loaded, "digests": digests})

    def _evict(self, message: Message, fds: list[int]) -> None:
        close_all(fds)
        function = FunctionId(*message["function"])
        self._host.evict(function)
        self._report("evicted", {"function": function, "reason": message["reason"]})

    def _attach(self, message: Message, fds: list[int]) -> None:
        shape = ChannelShape(**message["shape"])
        payload_fd, mailbox_fd, request_bell, answer_bell = fds
        payload = shared_memory.attach(payload_fd)
        box = shared_memory.attach(mailbox_fd)
        close_all([payload_fd, mailbox_fd])
        mailbox = Mailbox(box, shape)
        self._host.expect_rows(message["model"], shape.max_rows)
        self._engines[message["engine"]] = _Engine(
            model=message["model"],
            payload=Payload(payload, shape),
            mailbox=mailbox,
            regions=(payload, box),
            request_bell=request_bell,
            answer_bell=answer_bell,
            # What was asked of this device's previous worker has been given up by the engine.
            seen=mailbox.requested,
        )
        self._wake()
        self._reply({"op": "attached", "engine": message["engine"]})

    def _detach(self, message: Message, fds: list[int]) -> None:
        close_all(fds)
        engine = self._engines.pop(message["engine"], None)
        if engine is not None:
            # The invocation loop closes them, once it no longer polls them.
            self._to_close += [engine.request_bell, engine.answer_bell]
            self._wake()

    def _report(self, op: str, fields: Message) -> None:
        """Say what became of instances, and what all of them hold now."""
        self._reply({"op": op, **fields, "resident_bytes": self._host.resident_bytes})

    def _reply(self, message: Message) -> None:
        try:
            send(self._connection, message)
        except OSError:
            os._exit(0)  # the supervisor is gone

    def _wake(self) -> None:
        self._changed = True
        ring(self._changed_bell)


def _functions(message: Message) -> list[FunctionId]:
    return [FunctionId(*fields) for fields in message["functions"]]
