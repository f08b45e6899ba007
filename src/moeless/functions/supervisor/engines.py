"""The engines that are attached to a supervisor: from their first message to their end.

Engines of the same model share its instances and plans; one that ends disturbs no other. Planning
is done by the control loop that ``make_controller`` builds: this module decides nothing about
replicas.
"""

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

from moeless.errors import FunctionError, MoelessError
from moeless.functions.links.channel import ChannelShape
from moeless.functions.links.messages import Message, close_all, receive, send
from moeless.functions.links.wire import spec_from_json
from moeless.functions.planning.load_intake import LoadConsumer, LoadIntake
from moeless.functions.planning.load_sum import LoadSum
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.platform.platform import Platform
from moeless.functions.supervisor.attachment import MAX_DEVICES, Attachment
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.fleet import Fleet
from moeless.functions.supervisor.hosted_model import HostedModel, Joined
from moeless.functions.supervisor.models import HostedModels
from moeless.functions.supervisor.vital_signs import OpenWork
from moeless.functions.supervisor.wishes import read_wishes

_log = logging.getLogger(__name__)
MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError)
"""What a message raises whose fields are not what they should be."""

MakeController = Callable[[ModelPlacement, Message], LoadConsumer]


class Engines:
    """Attached engines.

    Args:
        config: What the supervisor was told.
        platform: Where models live.
        selector: Wakes the supervisor's loop; data is what to call.
        make_controller: Builds the control loop of a model from the attach request of the first
            of its engines.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        platform: Platform,
        selector: selectors.BaseSelector,
        make_controller: MakeController,
    ) -> None:
        self._config = config
        self._platform = platform
        self._selector = selector
        self._make_controller = make_controller
        self._joined: dict[int, Joined] = {}
        self._next_number = 0
        self.models = HostedModels(platform, on_known=self._begin, on_refused=self._refuse_all)

    def __iter__(self) -> Iterator[Joined]:
        return iter(list(self._joined.values()))

    def __len__(self) -> int:
        return len(self._joined)

    @property
    def may_be_in_the_way(self) -> bool:
        """Whether tokens wait, perhaps until another engine leaves a layer.

        Its board shows when it does. It need not ring: nobody asks for loads where plans stand.
        """
        return len(self._joined) > 1 and self._platform.has_demands

    def is_bell(self, fd: int) -> bool:
        """Whether a descriptor is that by which an engine says that it has loads to tell."""
        return any(joined.attachment.load_bell == fd for joined in self._joined.values())

    def attach(self, connection: socket.socket, message: Message) -> None:
        """Take an engine in; it hears more once all workers know its model.

        Raises:
            FunctionError: It cannot be taken in; the message says why.
        """
        spec = spec_from_json(message["spec"])
        shape = ChannelShape(**message["shape"])
        int(message["lookahead"])
        read_wishes(message)
        for field in ("directory", "layout"):
            str(message[field])
        num_devices = self._fleet.num_devices
        if num_devices > MAX_DEVICES:
            raise FunctionError(
                f"{num_devices} devices are too many for one engine; use at most {MAX_DEVICES}"
            )
        model = self.models.find(spec.model_id)
        if model is not None:
            model.check(spec, message)
        model = model or self.models.add(spec, message)
        self._next_number += 1
        attachment = Attachment(
            self._next_number,
            connection,
            spec=spec,
            shape=shape,
            num_devices=num_devices,
            model_fd=model.board_fd,
            latched=self._config.record,
        )
        joined = Joined(attachment=attachment, request=message)
        self._joined[attachment.number] = model.engines[attachment.number] = joined
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._hear(model, joined)
        )
        if model.placement is not None:
            self._begin(model)

    def report_finished(self) -> None:
        """Tell engines which of their demands have ended."""
        for result in self._platform.finished():
            joined = self._joined.get(result.engine)
            if joined is not None:
                message = {"op": "demanded", "ticket": result.ticket, "error": result.error}
                reply(joined.attachment.connection, message)

    def _hear(self, model: HostedModel, joined: Joined) -> None:
        try:
            received = receive(joined.attachment.connection)
        except (OSError, FunctionError):
            received = None
        if received is None:
            self._detach(model, joined)
            return
        message, fds = received
        close_all(fds)
        try:
            self._serve(model, joined, message)
        except MALFORMED:
            _log.exception("an engine sent a malformed %r; it is detached", message.get("op"))
            self._detach(model, joined)

    def _serve(self, model: HostedModel, joined: Joined, message: Message) -> None:
        placement = model.placement
        if placement is None or joined.intake is None:
            return
        if message.get("op") == "demand":
            self._platform.demand(
                placement,
                engine=joined.attachment.number,
                ticket=int(message["ticket"]),
                layer=int(message["layer"]),
                experts=[int(e) for e in message["experts"]],
            )
        elif message.get("op") == "doubt":
            work = OpenWork(
                allowed_s=float(message["allowed_s"]), waited_s=float(message["waited_s"])
            )
            engine = joined.attachment.number
            self._fleet.doubt(int(message["device"]), engine=engine, work=work)
        elif message.get("op") == "report":
            own = placement.report(joined.attachment.number)
            report = {"op": "report", **own, **self._fleet.report()}
            reply(joined.attachment.connection, report)

    def _detach(self, model: HostedModel, joined: Joined) -> None:
        """An engine is gone: free what it alone held; others of its model go on."""
        number = joined.attachment.number
        if self._joined.pop(number, None) is None:
            return  # known already
        del model.engines[number]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(joined.attachment.connection)
        if joined.intake is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(joined.attachment.load_bell)
            assert model.placement is not None
            assert model.loads is not None
            model.loads.forget(number)
            self._platform.leave(model.placement, number)
            for worker in self.models.workers_of(model):
                worker.order({"op": "detach", "engine": number})
            self._platform.advance()  # what it demanded or computed stands in nobody's way now
        joined.attachment.close()
        if not model.engines:
            model.consumer = model.loads = None
            if model.placement is None:
                self.models.drop(model)

    def _begin(self, model: HostedModel) -> None:
        """All workers know the model: let those of its engines begin that wait for it."""
        waiting = [joined for joined in model.engines.values() if joined.intake is None]
        is_first = model.consumer is None
        try:
            if is_first:
                self._place(model, waiting[0].request)
        except MoelessError as error:
            self._refuse_all(model, str(error))
            return
        assert model.consumer is not None
        for joined in waiting:
            self._connect(model, joined)
        if is_first:
            model.plan()
        for joined in waiting:
            reply(
                joined.attachment.connection,
                {
                    "op": "attached",
                    "workers": self._fleet.describe_workers(),
                    "function_bytes": model.function_bytes,
                    "wants_loads": model.consumer.adaptive,
                },
                fds=joined.attachment.engine_fds(),
            )

    def _place(self, model: HostedModel, request: Message) -> None:
        """Put a model on the platform as the first of its engines wants it."""
        wishes = read_wishes(request)
        if model.placement is None:
            model.placement = self._platform.add_model(
                model.spec,
                function_bytes=model.function_bytes,
                board=model.board,
                share=wishes.share,
                keep_alive=wishes.keep_alive,
            )
        else:
            self._platform.invite(
                model.placement, share=wishes.share, keep_alive=wishes.keep_alive
            )
        model.consumer = self._make_controller(model.placement, request)
        model.loads = LoadSum(model.consumer, model=model.placement)

    def _connect(self, model: HostedModel, joined: Joined) -> None:
        attachment = joined.attachment
        assert model.placement is not None
        assert model.loads is not None
        self._platform.join(model.placement, attachment.number, attachment.board)
        joined.intake = LoadIntake(attachment.board, model.loads.of(attachment.number))
        for worker in self.models.workers_of(model):
            attachment.connect(worker)
        self._selector.register(
            attachment.load_bell, selectors.EVENT_READ, lambda: self._hear_loads(joined)
        )

    def _hear_loads(self, joined: Joined) -> None:
        if joined.attachment.number not in self._joined:
            return  # it rang and left
        joined.attachment.quiet()
        if joined.intake is not None:
            joined.intake.take()
        if self._platform.has_demands:
            self._platform.advance()  # the layer that it has left may be what others wait for

    def _refuse_all(self, model: HostedModel, error: str) -> None:
        """Engines that wait for a model cannot have it."""
        for joined in list(model.engines.values()):
            if joined.intake is None:
                reply(joined.attachment.connection, {"op": "refused", "error": error})
                self._detach(model, joined)

    @property
    def _fleet(self) -> Fleet:
        assert self.models.fleet is not None
        return self.models.fleet


def reply(
    connection: socket.socket, message: dict[str, Any], fds: list[int] | None = None
) -> None:
    """Answer a peer; one that is gone is noticed by its closed connection."""
    with contextlib.suppress(OSError):
        send(connection, message, fds=fds or [])
