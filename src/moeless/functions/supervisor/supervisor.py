"""The supervisor's loop: one thread, one selector, no locks.

It waits for engines (attach, demand, loads that became known), for workers (loads that ended,
deaths), for operators and for time to pass; ``engines``, ``fleet`` and ``admin`` deal with them.
"""

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from moeless.core.events import SupervisorWoken
from moeless.core.ports import Clock, EventSink, KeepAlive
from moeless.errors import FunctionError, MoelessError, os_reason
from moeless.functions.links.messages import close_all, peer_uid, receive
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.load_limits import BATCH_BYTES, LoadLimits
from moeless.functions.supervisor.admin import AdminDesk, listen
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.devices import Devices
from moeless.functions.supervisor.engines import MALFORMED, Engines, MakeController, reply
from moeless.functions.supervisor.fleet import Fleet
from moeless.functions.supervisor.pool_directory import PoolDirectory

_TICK_S = 0.25
_LOOK_S = 0.01
"""How soon boards are looked at again while one engine may be in another's way."""

_OWNER_COMES_S = 30.0


class Supervisor:
    """Owns workers, pools and placement.

    Args:
        config: Workers, budgets and times.
        owner: Connection to the process that started us; None where nobody but signals may end
            us.
        clock: The time.
        keep_alive: How long idle instances stay.
        sink: Receives events.
        make_controller: Builds the control loop of a model from its attach request.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        owner: socket.socket | None,
        clock: Clock,
        keep_alive: KeepAlive,
        sink: EventSink,
        make_controller: MakeController,
    ) -> None:
        self._config = config
        self._owner = owner
        self._clock = clock
        self._sink = sink
        self._platform = Platform(
            [
                *(worker.budget_bytes for worker in config.workers),
                *[0] * (config.num_slots - len(config.workers)),
            ],
            clock=clock,
            keep_alive=keep_alive,
            sink=sink,
            linger_s=config.linger_s,
            # A record says when each load ended, and what was decided then.
            limits=LoadLimits(batch_bytes=0 if config.record else BATCH_BYTES),
        )
        self._selector = selectors.DefaultSelector()
        self._engines = Engines(
            config,
            platform=self._platform,
            selector=self._selector,
            make_controller=make_controller,
        )
        self._fleet = Fleet(
            config,
            platform=self._platform,
            selector=self._selector,
            clock=clock,
            sink=sink,
            owner=self._engines.models,
        )
        self._engines.models.fleet = self._fleet
        self._devices = Devices(
            self._fleet,
            platform=self._platform,
            clock=clock,
            sink=sink,
            replan=self._engines.models.replan,
        )
        self._admin = AdminDesk(
            PoolDirectory(Path(config.socket_path).parent).admin_socket,
            selector=self._selector,
            devices=self._devices,
            models=self._engines.models,
        )
        self._leave_at_s: float | None = None
        self._running = True
        self.ended_by = 0
        """The signal that has ended it, 0 for none."""

    def run(self, *, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until told to stop, or until nobody has needed us for a while.

        Args:
            on_listening: Called once engines can attach.
        """
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        owned = self._owner is not None
        signal.signal(signal.SIGINT, signal.SIG_IGN if owned else self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        listener = listen(Path(self._config.socket_path))
        try:
            self._admin.open()
            self._selector.register(wake_read, selectors.EVENT_READ, lambda: _drain(wake_read))
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
            if self._owner is not None:
                self._selector.register(self._owner, selectors.EVENT_READ, self._hear_owner)
            try:
                self._fleet.start()
            except OSError as error:
                reason = f"no worker can be started: {os_reason(error)}"
                if self._owner is None:
                    raise FunctionError(reason) from error
                _refuse_next(listener, reason)  # whoever started this is about to attach
                return
            on_listening()
            next_tick_s = self._clock.now_s() + _TICK_S
            while self._running:
                look = self._engines.may_be_in_the_way
                pause_s = max(0.0, next_tick_s - self._clock.now_s())
                ready = self._selector.select(min(pause_s, _LOOK_S) if look else pause_s)
                for key, _ in ready:
                    self._note_waking("loads" if self._engines.is_bell(key.fd) else "message")
                    key.data()
                if look and not ready:
                    self._platform.advance()
                self._devices.follow()
                self._engines.report_finished()
                if self._clock.now_s() >= next_tick_s:
                    self._note_waking("tick")
                    self._tick()
                    next_tick_s = self._clock.now_s() + _TICK_S
        finally:
            self._fleet.close()
            self._admin.close()
            listener.close()
            Path(self._config.socket_path).unlink(missing_ok=True)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._running = False
        self.ended_by = number

    def _note_waking(self, cause: str) -> None:
        """For the record: what is decided from now on is decided for this position."""
        if not self._config.record:
            return
        for joined in self._engines:
            position = joined.attachment.look()
            self._sink.emit(
                SupervisorWoken(
                    time_s=self._clock.now_s(),
                    model=joined.attachment.spec.model_id,
                    cause=cause,
                    step=position.step,
                    layer=position.layer,
                    used=position.used,
                )
            )

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        self._platform.tick()
        if not self._config.record:  # what is recorded is to be repeated, measured times are not
            self._platform.speeds.take()
        self._fleet.tick()
        self._engines.models.tick()
        if len(self._engines):
            self._leave_at_s = None
        elif self._owner is None and not self._config.stays:
            if self._leave_at_s is None:
                self._leave_at_s = now_s + self._config.linger_s
            elif now_s >= self._leave_at_s:
                self._running = False

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
            self._engines.attach(connection, message)
        except MoelessError as error:
            _refuse(connection, str(error))
        except OSError as error:
            _refuse(connection, f"no engine can be taken: {os_reason(error)}")
        except MALFORMED as error:
            _refuse(connection, f"malformed request: {error!r}")


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _refuse_next(listener: socket.socket, error: str) -> None:
    """Tell the next who connects why nobody is served."""
    listener.settimeout(_OWNER_COMES_S)
    with contextlib.suppress(OSError):  # nobody came, or not for long
        connection, _ = listener.accept()
        received = receive(connection)
        if received is not None:
            close_all(received[1])
        _refuse(connection, error)


def _refuse(connection: socket.socket, error: str) -> None:
    reply(connection, {"op": "refused", "error": error})
    connection.close()
