"""The engines that are attached to a supervisor: from their first message to their end.

Planning is done by the controller that ``make_controller`` builds: this module decides nothing
about replicas.
"""

import contextlib
import dataclasses
import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

from moeless.core.ports import EventSink
from moeless.errors import FunctionError, MoelessError
from moeless.functions.channel import ChannelShape
from moeless.functions.load_intake import LoadConsumer, LoadIntake
from moeless.functions.messages import Message, close_all, receive, send
from moeless.functions.model_placement import ModelPlacement
from moeless.functions.platform import Platform
from moeless.functions.supervisor.attachment import MAX_DEVICES, Attachment
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.fleet import Fleet
from moeless.functions.supervisor.worker_process import WorkerProcess
from moeless.functions.wire import spec_from_json

_log = logging.getLogger(__name__)
_START_TRIES = 3
"""Workers that may fail in a row before an engine that waits for them is refused."""
_TICKS_PER_TRY = 8
"""Looks around between two attempts to have a worker serve a model that it could not serve."""
MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError)
"""What a message raises whose fields are not what they should be."""

MakeController = Callable[[ModelPlacement, Message], LoadConsumer]


@dataclasses.dataclass(kw_only=True)
class Joined:
    """An engine from its attach request on; complete once all workers know its model."""

    attachment: Attachment
    request: Message
    awaited: set[int]
    function_bytes: int = 0
    model: ModelPlacement | None = None
    consumer: LoadConsumer | None = None
    intake: LoadIntake | None = None


class Engines:
    """Attached engines. A ``fleet.FleetOwner``.

    Args:
        config: What the supervisor was told.
        platform: Where models live.
        selector: Wakes the supervisor's loop; data is what to call.
        sink: Receives events.
        make_controller: Builds the control loop of a model from its attach request.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        platform: Platform,
        selector: selectors.BaseSelector,
        sink: EventSink,
        make_controller: MakeController,
    ) -> None:
        self._config = config
        self._platform = platform
        self._selector = selector
        self._sink = sink
        self._make_controller = make_controller
        self._joined: dict[int, Joined] = {}
        self._sources: dict[str, tuple[str, str]] = {}
        self._next_number = 0
        self._ticks = 0
        self.fleet: Fleet | None = None
        """The workers; set once, before the first message."""

    def __iter__(self) -> Iterator[Joined]:
        return iter(list(self._joined.values()))

    def __len__(self) -> int:
        return len(self._joined)

    # Engines

    def attach(self, connection: socket.socket, message: Message) -> None:
        """Take an engine in; it hears more once all workers know its model.

        Raises:
            FunctionError: It cannot be taken in; the message says why.
        """
        spec = spec_from_json(message["spec"])
        shape = ChannelShape(**message["shape"])
        source = (str(message["directory"]), str(message["layout"]))
        int(message["lookahead"])
        if self._joined:
            raise FunctionError(
                "another engine is attached to this supervisor; one at a time is supported: "
                "end it first, or start a supervisor of your own"
            )
        known = self._sources.get(spec.model_id, source)
        if known != source:
            raise FunctionError(
                f"{spec.model_id} is known here from {known[0]}, not from {source[0]}; "
                f"serve it under another model id"
            )
        num_devices = len(self._config.workers)
        if num_devices > MAX_DEVICES:
            raise FunctionError(
                f"{num_devices} devices are too many for one engine; use at most {MAX_DEVICES}"
            )
        self._next_number += 1
        attachment = Attachment(
            self._next_number,
            connection,
            spec=spec,
            shape=shape,
            num_devices=num_devices,
            latched=self._config.record,
        )
        joined = Joined(attachment=attachment, request=message, awaited=set(range(num_devices)))
        self._joined[attachment.number] = joined
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(joined))
        for worker in self._workers():
            if worker.ready:
                _introduce(worker, joined)

    def report_finished(self) -> None:
        """Tell engines which demands have ended."""
        for result in self._platform.finished():
            message = {"op": "demanded", "ticket": result.ticket, "error": result.error}
            for joined in self._joined.values():
                reply(joined.attachment.connection, message)

    def _hear(self, joined: Joined) -> None:
        try:
            received = receive(joined.attachment.connection)
        except (OSError, FunctionError):
            received = None
        if received is None:
            self._detach(joined)
            return
        message, fds = received
        close_all(fds)
        try:
            self._serve(joined, message)
        except MALFORMED:
            _log.exception("an engine sent a malformed %r; it is detached", message.get("op"))
            self._detach(joined)

    def _serve(self, joined: Joined, message: Message) -> None:
        assert self.fleet is not None
        model = joined.model
        if message.get("op") == "demand" and model is not None:
            self._platform.demand(
                model,
                ticket=int(message["ticket"]),
                layer=int(message["layer"]),
                experts=[int(e) for e in message["experts"]],
            )
        elif message.get("op") == "kill" and model is not None:
            self.fleet.lose_device(int(message["device"]), str(message["reason"]))
        elif message.get("op") == "report" and model is not None:
            report = {"op": "report", **model.report(), **self.fleet.report()}
            reply(joined.attachment.connection, report)

    def _detach(self, joined: Joined) -> None:
        """An engine is gone: forget its model and free what it held."""
        if self._joined.pop(joined.attachment.number, None) is None:
            return  # known already
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(joined.attachment.connection)
        if joined.model is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(joined.attachment.load_bell)
            self._platform.release(joined.model)
        for worker in self._workers():
            worker.order({"op": "detach", "engine": joined.attachment.number})
        joined.attachment.close()

    def _complete(self, joined: Joined) -> None:
        """All workers know the model: put it on the platform and let the engine begin."""
        attachment = joined.attachment
        try:
            model = self._platform.add_model(
                attachment.spec, function_bytes=joined.function_bytes, board=attachment.board
            )
            joined.model = model
            joined.consumer = self._make_controller(model, joined.request)
        except MoelessError as error:
            reply(attachment.connection, {"op": "refused", "error": str(error)})
            self._detach(joined)
            return
        self._sources[attachment.spec.model_id] = (
            str(joined.request["directory"]),
            str(joined.request["layout"]),
        )
        joined.intake = LoadIntake(attachment.board, joined.consumer)
        for worker in self._workers():
            message, fds = attachment.worker_order(worker.device)
            worker.order(message, fds=fds)
        joined.consumer.start()
        self._selector.register(
            attachment.load_bell, selectors.EVENT_READ, lambda: self._hear_loads(joined)
        )
        reply(
            attachment.connection,
            {
                "op": "attached",
                "num_devices": len(self._config.workers),
                "function_bytes": joined.function_bytes,
                "wants_loads": joined.consumer.adaptive,
            },
            fds=attachment.engine_fds(),
        )

    def _hear_loads(self, joined: Joined) -> None:
        if joined.attachment.number not in self._joined:
            return  # it rang and left
        joined.attachment.quiet()
        if joined.intake is not None:
            joined.intake.take()

    # Workers

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker takes orders: tell it about models."""
        for joined in self._joined.values():
            _introduce(worker, joined)
        if not self._joined:
            self._platform.device_up(worker.device, worker)

    def worker_knows_model(self, worker: WorkerProcess, message: Message) -> None:
        """A worker knows a model, or cannot; engines that waited for it may begin."""
        assert self.fleet is not None
        for joined in self:
            if joined.attachment.spec.model_id != message["model"]:
                continue
            if "error" in message:
                if joined.model is None:
                    self._refuse(joined, message["error"])
                else:
                    self._bar(joined.model, worker, message["error"])
                return
            if joined.model is not None:  # a restarted worker: first the channel, then loads
                order, fds = joined.attachment.worker_order(worker.device)
                worker.order(order, fds=fds)
                self._platform.unbar(joined.model, worker.device)
            self._take_in(worker)
            self._replan_fixed()
            joined.awaited.discard(worker.device)
            joined.function_bytes = max(joined.function_bytes, int(message["function_bytes"]))
            if joined.model is None and not joined.awaited:
                self._complete(joined)

    def _take_in(self, worker: WorkerProcess) -> None:
        """A worker knows the models, or why it cannot: it may carry out orders."""
        if worker.device not in self._platform.hosts:
            self._platform.device_up(worker.device, worker)

    def _bar(self, model: ModelPlacement, worker: WorkerProcess, reason: str) -> None:
        """A restarted worker cannot serve a model, whose files are damaged as a rule."""
        if worker.device not in model.barred:
            _log.warning(
                "device %d cannot serve %s: %s", worker.device, model.spec.model_id, reason
            )
        self._platform.bar(model, worker.device, reason=reason)
        self._take_in(worker)

    def tick(self) -> None:
        """Have workers try models again that they could not serve."""
        self._ticks += 1
        if self._ticks % _TICKS_PER_TRY:
            return
        for joined in self._joined.values():
            for worker in self._workers():
                if joined.model is not None and worker.device in joined.model.barred:
                    _introduce(worker, joined)

    def worker_lost(self, device: int, *, reason: str, failures: int) -> None:
        """A device has lost its worker: its successor has to learn the models, too."""
        self._replan_fixed()
        for joined in self:
            if joined.model is not None:
                continue
            joined.awaited.add(device)
            if failures >= _START_TRIES:
                self._refuse(joined, f"the worker of device {device} does not start: {reason}")

    def _refuse(self, joined: Joined, error: str) -> None:
        reply(joined.attachment.connection, {"op": "refused", "error": error})
        self._detach(joined)

    def _replan_fixed(self) -> None:
        """Plans that do not follow loads still follow devices."""
        for joined in self._joined.values():
            if joined.consumer is not None and not joined.consumer.adaptive:
                joined.consumer.start()

    def _workers(self) -> Iterator[WorkerProcess]:
        assert self.fleet is not None
        return iter(self.fleet)


def _introduce(worker: WorkerProcess, joined: Joined) -> None:
    request = joined.request
    worker.order(
        {
            "op": "model",
            "model": joined.attachment.spec.model_id,
            "spec": request["spec"],
            "layout": request["layout"],
            "directory": request["directory"],
        }
    )


def reply(
    connection: socket.socket, message: dict[str, Any], fds: list[int] | None = None
) -> None:
    """Answer a peer; one that is gone is noticed by its closed connection."""
    with contextlib.suppress(OSError):
        send(connection, message, fds=fds or [])
