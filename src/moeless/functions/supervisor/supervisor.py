"""The supervisor's loop: one thread, one selector, no locks.

It waits for engines (attach, demand, loads that became known), for workers (loads that ended,
deaths) and for time to pass. Planning is done by the controller that ``make_controller`` builds:
this module decides nothing about replicas.
"""

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeless.core.events import SupervisorWoken, WorkerLost, WorkerStarted
from moeless.core.model import FunctionId
from moeless.core.ports import Clock, EventSink, KeepAlive
from moeless.errors import ConfigError, FunctionError, MoelessError
from moeless.functions.channel import ChannelShape
from moeless.functions.load_intake import LoadConsumer, LoadIntake
from moeless.functions.messages import Message, close_all, peer_uid, receive, send
from moeless.functions.model_placement import ModelPlacement
from moeless.functions.platform import Platform
from moeless.functions.supervisor.attachment import MAX_DEVICES, Attachment
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.worker_process import WorkerProcess
from moeless.functions.wire import spec_from_json

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_START_TRIES = 3
"""Workers that may fail in a row before an engine that waits for them is refused."""
_STEADY_S = 30.0
"""A worker that lived this long is no failure in a row: the shortest wait follows."""
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError)
"""What a message raises whose fields are not what they should be."""


MakeController = Callable[[ModelPlacement, Message], LoadConsumer]


@dataclasses.dataclass(kw_only=True)
class _Joined:
    """An engine from its attach request on; complete once all workers know its model."""

    attachment: Attachment
    request: Message
    awaited: set[int]
    function_bytes: int = 0
    model: ModelPlacement | None = None
    consumer: LoadConsumer | None = None
    intake: LoadIntake | None = None


class Supervisor:
    """Owns workers, pools and placement.

    Args:
        config: Workers, budgets and times.
        owner: Connection to the process that started us.
        clock: The time.
        keep_alive: How long idle instances stay.
        sink: Receives events.
        make_controller: Builds the control loop of a model from its attach request.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        owner: socket.socket,
        clock: Clock,
        keep_alive: KeepAlive,
        sink: EventSink,
        make_controller: MakeController,
    ) -> None:
        self._config = config
        self._owner: socket.socket | None = owner
        self._clock = clock
        self._sink = sink
        self._make_controller = make_controller
        self._platform = Platform(
            [worker.budget_bytes for worker in config.workers],
            clock=clock,
            keep_alive=keep_alive,
            sink=sink,
        )
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}
        self._restart_at_s: dict[int, float] = {}
        self._restarts = [0] * len(config.workers)
        self._failures = [0] * len(config.workers)
        self._started_s = [0.0] * len(config.workers)
        self._joined: dict[int, _Joined] = {}
        self._sources: dict[str, tuple[str, str]] = {}
        self._next_number = 0
        self._leave_at_s: float | None = None
        self._running = True

    def run(self) -> None:
        """Serve until told to stop, or until nobody has needed us for a while."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides
        signal.signal(signal.SIGCHLD, lambda *_: None)
        listener = self._listen()
        try:
            self._selector.register(wake_read, selectors.EVENT_READ, lambda: _drain(wake_read))
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
            if self._owner is not None:
                self._selector.register(self._owner, selectors.EVENT_READ, self._hear_owner)
            for device in range(len(self._config.workers)):
                self._start_worker(device)
            next_tick_s = self._clock.now_s() + _TICK_S
            while self._running:
                for key, _ in self._selector.select(max(0.0, next_tick_s - self._clock.now_s())):
                    self._note_waking("message")
                    key.data()
                self._report_finished()
                if self._clock.now_s() >= next_tick_s:
                    self._note_waking("tick")
                    self._tick()
                    next_tick_s = self._clock.now_s() + _TICK_S
        finally:
            for worker in self._workers.values():
                worker.kill()
            listener.close()
            Path(self._config.socket_path).unlink(missing_ok=True)

    def _stop(self) -> None:
        self._running = False

    def _listen(self) -> socket.socket:
        path = Path(self._config.socket_path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        old_mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
        finally:
            os.umask(old_mask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listener.listen(16)
        return listener

    def _note_waking(self, cause: str) -> None:
        """For the record: what is decided from now on is decided for this position."""
        if not self._config.record:
            return
        for joined in self._joined.values():
            step, layer = joined.attachment.look()
            self._sink.emit(
                SupervisorWoken(
                    time_s=self._clock.now_s(),
                    model=joined.attachment.spec.model_id,
                    cause=cause,
                    step=step,
                    layer=layer,
                )
            )

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        self._platform.tick()
        for device, at_s in list(self._restart_at_s.items()):
            if now_s >= at_s:
                del self._restart_at_s[device]
                self._start_worker(device)
        for device, worker in list(self._workers.items()):
            late = now_s - self._started_s[device] > self._config.start_timeout_s
            if not worker.ready and late:
                worker.reason = f"did not start within {self._config.start_timeout_s:g} s"
                self._lose_worker(worker)
        if self._joined:
            self._leave_at_s = None
        elif self._owner is None:
            if self._leave_at_s is None:
                self._leave_at_s = now_s + self._config.linger_s
            elif now_s >= self._leave_at_s:
                self._running = False

    # The owner and engines

    def _hear_owner(self) -> None:
        assert self._owner is not None
        received = receive(self._owner)
        if received is None:
            self._selector.unregister(self._owner)
            self._owner.close()
            self._owner = None
            return
        message, fds = received
        close_all(fds)
        if message.get("op") == "stop":
            self._running = False

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has hung up already
            return
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._hear_newcomer(connection)
        )

    def _hear_newcomer(self, connection: socket.socket) -> None:
        """The first message of a connection says what it is for."""
        self._selector.unregister(connection)
        try:
            received = receive(connection)
            if received is None:
                connection.close()
                return
            message, fds = received
            close_all(fds)
            if message.get("op") != "attach":
                raise FunctionError(f"expected an attach request, got {message.get('op')!r}")
            self._attach(connection, message)
        except MoelessError as error:
            _refuse(connection, str(error))
        except (*_MALFORMED, OSError) as error:
            _refuse(connection, f"malformed request: {error!r}")

    def _attach(self, connection: socket.socket, message: Message) -> None:
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
        if len(self._config.workers) > MAX_DEVICES:
            raise FunctionError(
                f"{len(self._config.workers)} devices are too many for one engine; "
                f"use at most {MAX_DEVICES}"
            )
        self._next_number += 1
        attachment = Attachment(
            self._next_number,
            connection,
            spec=spec,
            shape=shape,
            num_devices=len(self._config.workers),
            latched=self._config.record,
        )
        joined = _Joined(
            attachment=attachment, request=message, awaited=set(range(len(self._config.workers)))
        )
        self._joined[attachment.number] = joined
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._hear_engine(joined)
        )
        for worker in self._workers.values():
            if worker.ready:
                self._introduce(worker, joined)

    def _introduce(self, worker: WorkerProcess, joined: _Joined) -> None:
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

    def _hear_engine(self, joined: _Joined) -> None:
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
            self._serve_engine(joined, message)
        except _MALFORMED:
            _log.exception("an engine sent a malformed %r; it is detached", message.get("op"))
            self._detach(joined)

    def _serve_engine(self, joined: _Joined, message: Message) -> None:
        model = joined.model
        if message.get("op") == "demand" and model is not None:
            self._platform.demand(
                model,
                ticket=int(message["ticket"]),
                layer=int(message["layer"]),
                experts=[int(e) for e in message["experts"]],
            )
        elif message.get("op") == "kill" and model is not None:
            self._lose_device(int(message["device"]), str(message["reason"]))
        elif message.get("op") == "report" and model is not None:
            _reply(joined.attachment.connection, self._report(joined))

    def _report(self, joined: _Joined) -> Message:
        model = joined.model
        assert model is not None
        return {
            "op": "report",
            **model.report(),
            "worker_restarts": self._restarts,
            "worker_peak_bytes": [
                self._workers[d].peak_bytes if d in self._workers else 0
                for d in range(len(self._config.workers))
            ],
            "worker_pids": [
                self._workers[d].process.pid if d in self._workers else None
                for d in range(len(self._config.workers))
            ],
        }

    def _detach(self, joined: _Joined) -> None:
        """An engine is gone: forget its model and free what it held."""
        if self._joined.pop(joined.attachment.number, None) is None:
            return  # known already
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(joined.attachment.connection)
        if joined.model is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(joined.attachment.load_bell)
            self._platform.release(joined.model)
        for worker in self._workers.values():
            worker.order({"op": "detach", "engine": joined.attachment.number})
        joined.attachment.close()

    def _complete(self, joined: _Joined) -> None:
        """All workers know the model: put it on the platform and let the engine begin."""
        attachment = joined.attachment
        try:
            model = self._platform.add_model(
                attachment.spec, function_bytes=joined.function_bytes, board=attachment.board
            )
            joined.model = model
            joined.consumer = self._make_controller(model, joined.request)
        except MoelessError as error:
            _reply(attachment.connection, {"op": "refused", "error": str(error)})
            self._detach(joined)
            return
        self._sources[attachment.spec.model_id] = (
            str(joined.request["directory"]),
            str(joined.request["layout"]),
        )
        joined.intake = LoadIntake(attachment.board, joined.consumer)
        for worker in self._workers.values():
            message, fds = attachment.worker_order(worker.device)
            worker.order(message, fds=fds)
        joined.consumer.start()
        self._selector.register(
            attachment.load_bell, selectors.EVENT_READ, lambda: self._hear_loads(joined)
        )
        _reply(
            attachment.connection,
            {
                "op": "attached",
                "num_devices": len(self._config.workers),
                "function_bytes": joined.function_bytes,
                "wants_loads": joined.consumer.adaptive,
            },
            fds=attachment.engine_fds(),
        )

    def _hear_loads(self, joined: _Joined) -> None:
        if joined.attachment.number not in self._joined:
            return  # it rang and left
        joined.attachment.quiet()
        if joined.intake is not None:
            joined.intake.take()

    def _report_finished(self) -> None:
        for result in self._platform.finished():
            for joined in self._joined.values():
                _reply(
                    joined.attachment.connection,
                    {"op": "demanded", "ticket": result.ticket, "error": result.error},
                )

    # Workers

    def _start_worker(self, device: int) -> None:
        worker = WorkerProcess(
            device, self._config.workers[device], generation=self._restarts[device]
        )
        self._workers[device] = worker
        self._started_s[device] = self._clock.now_s()
        self._selector.register(
            worker.connection, selectors.EVENT_READ, lambda: self._hear_worker(worker)
        )

    def _hear_worker(self, worker: WorkerProcess) -> None:
        try:
            received = receive(worker.connection)
        except (OSError, FunctionError):
            received = None
        if received is None:
            self._lose_worker(worker)
            return
        message, fds = received
        close_all(fds)
        handlers: dict[str, Callable[[WorkerProcess, Message], None]] = {
            "ready": self._worker_ready,
            "model": self._worker_knows_model,
            "attached": lambda *_: None,
            "loaded": lambda w, m: self._platform.loaded(w.device, _function(m)),
            "failed": lambda w, m: self._platform.failed(
                w.device, _function(m), reason=m["reason"]
            ),
            "evicted": lambda w, m: self._platform.evicted(
                w.device, _function(m), reason=m["reason"]
            ),
        }
        worker.peak_bytes = max(worker.peak_bytes, int(message.get("resident_bytes", 0)))
        handlers[message["op"]](worker, message)

    def _worker_ready(self, worker: WorkerProcess, _message: Message) -> None:
        worker.ready = True
        self._sink.emit(
            WorkerStarted(
                time_s=self._clock.now_s(),
                model="",
                device=worker.device,
                restarts=self._restarts[worker.device],
            )
        )
        for joined in self._joined.values():
            self._introduce(worker, joined)
        if not self._joined:
            self._platform.device_up(worker.device, worker)

    def _worker_knows_model(self, worker: WorkerProcess, message: Message) -> None:
        for joined in list(self._joined.values()):
            if joined.attachment.spec.model_id != message["model"]:
                continue
            if "error" in message:
                if joined.model is None:
                    _reply(
                        joined.attachment.connection,
                        {"op": "refused", "error": message["error"]},
                    )
                    self._detach(joined)
                    return
                worker.reason = message["error"]
                self._lose_worker(worker)
                return
            if joined.model is not None:  # a restarted worker: first the channel, then loads
                order, fds = joined.attachment.worker_order(worker.device)
                worker.order(order, fds=fds)
            self._platform.device_up(worker.device, worker)
            self._replan_fixed()
            joined.awaited.discard(worker.device)
            joined.function_bytes = max(joined.function_bytes, int(message["function_bytes"]))
            if joined.model is None and not joined.awaited:
                self._complete(joined)

    def _replan_fixed(self) -> None:
        """Plans that do not follow loads still follow devices."""
        for joined in self._joined.values():
            if joined.consumer is not None and not joined.consumer.adaptive:
                joined.consumer.start()

    def _lose_device(self, device: int, reason: str) -> None:
        worker = self._workers.get(device)
        if worker is not None:
            worker.reason = reason
            self._lose_worker(worker)

    def _lose_worker(self, worker: WorkerProcess) -> None:
        """A worker is gone, or given up: its tokens go elsewhere, a new one is started later."""
        if self._workers.get(worker.device) is not worker:
            return
        del self._workers[worker.device]
        self._selector.unregister(worker.connection)
        worker.kill()
        device = worker.device
        self._platform.device_down(device, returns=True)
        self._replan_fixed()
        for joined in self._joined.values():
            if joined.model is None:
                joined.awaited.add(device)  # its successor has to learn the model, too
        now_s = self._clock.now_s()
        if worker.ready and now_s - self._started_s[device] >= _STEADY_S:
            self._failures[device] = 0
        wait_s = min(30.0, self._config.restart_backoff_s * 2 ** min(self._failures[device], 10))
        self._failures[device] += 1
        self._restarts[device] += 1
        self._restart_at_s[device] = now_s + wait_s
        self._sink.emit(WorkerLost(time_s=now_s, model="", device=device, reason=worker.reason))
        _log.warning(
            "worker of device %d lost (%s), restart in %.1f s", device, worker.reason, wait_s
        )
        if self._failures[device] >= _START_TRIES:
            for joined in list(self._joined.values()):
                if joined.model is None:
                    error = f"the worker of device {device} does not start: {worker.reason}"
                    _reply(joined.attachment.connection, {"op": "refused", "error": error})
                    self._detach(joined)


def _function(message: Message) -> FunctionId:
    return FunctionId(*message["function"])


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _reply(
    connection: socket.socket, message: dict[str, Any], fds: list[int] | None = None
) -> None:
    """Answer a peer; one that is gone is noticed by its closed connection."""
    with contextlib.suppress(OSError):
        send(connection, message, fds=fds or [])


def _refuse(connection: socket.socket, error: str) -> None:
    _reply(connection, {"op": "refused", "error": error})
    connection.close()
