"""The workers of a supervisor: their start, their messages, their loss and their restart.

It decides nothing about instances: what workers report goes to the platform. It must not know
engines; their owner is told what workers know and which devices were lost.
"""

import logging
import selectors
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from moeless.core.events import WorkerLost, WorkerStarted
from moeless.core.model import FunctionId
from moeless.core.ports import Clock, EventSink
from moeless.errors import FunctionError
from moeless.functions.messages import Message, close_all, receive
from moeless.functions.platform import Platform
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.spares import Spares
from moeless.functions.supervisor.worker_process import WorkerProcess

_log = logging.getLogger(__name__)
_STEADY_S = 30.0
"""A worker that lived this long is no failure in a row: the shortest wait follows."""
_LONGEST_WAIT_S = 30.0
_DOUBT_SHARE = 0.1
_LEAST_DOUBT_S = 1.0
"""A worker that tokens wait for is given up after this part of the time without a sign of life."""
_PAUSE_S = 2.0
"""More time between two looks at the workers means that the supervisor itself stood still."""
_HICCUP_S = 0.75
"""The same where little time without a sign of life is enough to give a worker up."""


class FleetOwner(Protocol):
    """Told about workers."""

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker takes orders; it holds nothing and knows no model."""
        ...

    def worker_knows_model(self, worker: WorkerProcess, message: Message) -> None:
        """A worker has answered an order of the kind ``model``."""
        ...

    def worker_lost(self, device: int, *, reason: str, failures: int) -> None:
        """A device has lost its worker, for the n-th time in a row; a new one will start."""
        ...


class Fleet:
    """One worker process per device.

    Args:
        config: Workers and times.
        platform: Told what became of orders.
        selector: Wakes the supervisor's loop; data is what to call.
        clock: The time.
        sink: Receives events.
        owner: Told about workers.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        platform: Platform,
        selector: selectors.BaseSelector,
        clock: Clock,
        sink: EventSink,
        owner: FleetOwner,
    ) -> None:
        self._config = config
        self._platform = platform
        self._selector = selector
        self._clock = clock
        self._sink = sink
        self._owner = owner
        self._workers: dict[int, WorkerProcess] = {}
        self._spares = Spares(config.spare_workers)
        self._doubted: set[int] = set()
        self._digests: dict[FunctionId, str] = {}
        self._restart_at_s: dict[int, float] = {}
        self._restarts = [0] * len(config.workers)
        self._failures = [0] * len(config.workers)
        self._started_s = [0.0] * len(config.workers)
        self._last_tick_s = self._awake_s = clock.now_s()
        self._handlers: dict[str, Callable[[WorkerProcess, Message], None]] = {
            "ready": self._ready,
            "model": owner.worker_knows_model,
            "attached": lambda *_: None,
            "loaded": self._loaded,
            "failed": lambda w, m: platform.failed(w.device, _function(m), reason=m["reason"]),
            "evicted": lambda w, m: platform.evicted(w.device, _function(m), reason=m["reason"]),
        }

    def __iter__(self) -> Iterator[WorkerProcess]:
        """The workers that live, ready or not."""
        return iter(list(self._workers.values()))

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self._config.workers)

    def report(self) -> Message:
        """Workers as part of an engine's report; lists are by device."""
        workers: Sequence[WorkerProcess | None] = [
            self._workers.get(device) for device in range(self.num_devices)
        ]
        return {
            "worker_restarts": self._restarts,
            "worker_peak_bytes": [w.peak_bytes if w else 0 for w in workers],
            "worker_pids": [w.process.pid if w else None for w in workers],
            "spare_pids": self._spares.pids(),
        }

    def start(self) -> None:
        """Start all workers."""
        for device in range(self.num_devices):
            self._start(device)

    def tick(self) -> None:
        """Start what is due again; give up what does not start."""
        now_s = self._clock.now_s()
        self._start_due(now_s)
        since_s = now_s - self._last_tick_s
        self._last_tick_s = now_s
        if since_s > _PAUSE_S:
            self._awake_s = now_s  # we were stopped, and workers perhaps with us
        if since_s <= _HICCUP_S:
            self._give_up_doubted(now_s)
        self._doubted.clear()  # whose tokens still wait is said again
        for worker in self:
            reason = self._find_fault(worker, now_s)
            if reason is not None:
                self.lose(worker, reason)
        if len(self._workers) == self.num_devices and all(w.ready for w in self):
            self._spares.tick()

    def doubt(self, device: int) -> None:
        """Tokens wait for a device's worker: see soon whether it still shows signs of life."""
        self._doubted.add(device)

    def _give_up_doubted(self, now_s: float) -> None:
        """Replace workers that have stopped while tokens wait for them."""
        silence_s = max(_LEAST_DOUBT_S, _DOUBT_SHARE * self._config.silence_s)
        for worker in self:
            silent_s = now_s - max(worker.pulse.last_s(), self._awake_s)
            if worker.device in self._doubted and worker.ready and silent_s > silence_s:
                reason = f"no sign of life for {silence_s:g} s, and tokens wait for it"
                self.lose(worker, reason)

    def _find_fault(self, worker: WorkerProcess, now_s: float) -> str | None:
        """Why a worker has to be replaced, if it has."""
        config = self._config
        started_s = self._started_s[worker.device]
        if not worker.ready:
            late = now_s - started_s > config.start_timeout_s
            return f"did not start within {config.start_timeout_s:g} s" if late else None
        if now_s - max(worker.pulse.last_s(), self._awake_s) > config.silence_s:
            return f"no sign of life for {config.silence_s:g} s"
        stirred_s = max(worker.stirred_s, self._awake_s)
        if worker.open_orders and now_s - stirred_s > config.order_timeout_s:
            return f"did not carry out an order within {config.order_timeout_s:g} s"
        return None

    def lose_device(self, device: int, reason: str) -> None:
        """Give up the worker of a device, if it has one."""
        worker = self._workers.get(device)
        if worker is not None:
            self.lose(worker, reason)

    def lose(self, worker: WorkerProcess, reason: str) -> None:
        """A worker is gone, or given up: its tokens go elsewhere, a new one is started later."""
        device = worker.device
        if self._workers.get(device) is not worker:
            return
        del self._workers[device]
        self._selector.unregister(worker.connection)
        worker.kill()
        self._platform.device_down(device, returns=True)
        now_s = self._clock.now_s()
        if worker.ready and now_s - self._started_s[device] >= _STEADY_S:
            self._failures[device] = 0
        wait_s = min(
            _LONGEST_WAIT_S,
            self._config.restart_backoff_s * 2 ** min(self._failures[device], 10),
        )
        if not self._failures[device] and self._spares.pids():
            wait_s = 0.0  # it costs next to nothing
        self._failures[device] += 1
        self._restarts[device] += 1
        self._restart_at_s[device] = now_s + wait_s
        self._sink.emit(WorkerLost(time_s=now_s, model="", device=device, reason=reason))
        _log.warning("worker of device %d lost (%s), restart in %.1f s", device, reason, wait_s)
        self._owner.worker_lost(device, reason=reason, failures=self._failures[device])
        self._start_due(now_s)

    def close(self) -> None:
        """End all workers now."""
        for worker in self:
            worker.kill()
        self._spares.close()

    def _start_due(self, now_s: float) -> None:
        for device, at_s in list(self._restart_at_s.items()):
            if now_s >= at_s:
                del self._restart_at_s[device]
                self._start(device)

    def _start(self, device: int) -> None:
        config = self._config.workers[device]
        worker = WorkerProcess(
            device,
            config,
            generation=self._restarts[device],
            digests=self._digests,
            launch=self._spares.take(config),
        )
        self._workers[device] = worker
        self._started_s[device] = self._clock.now_s()
        self._selector.register(
            worker.connection, selectors.EVENT_READ, lambda: self._hear(worker)
        )

    def _hear(self, worker: WorkerProcess) -> None:
        try:
            received = receive(worker.connection)
        except (OSError, FunctionError):
            received = None
        if received is None:
            self.lose(worker, worker.launch.describe_end())
            return
        message, fds = received
        close_all(fds)
        worker.peak_bytes = max(worker.peak_bytes, int(message.get("resident_bytes", 0)))
        if message["op"] != "ready":
            worker.note_answer()
        self._handlers[message["op"]](worker, message)

    def _loaded(self, worker: WorkerProcess, message: Message) -> None:
        function = _function(message)
        self._digests.setdefault(function, str(message["digest"]))
        self._platform.loaded(worker.device, function)

    def _ready(self, worker: WorkerProcess, _message: Message) -> None:
        worker.ready = True
        self._sink.emit(
            WorkerStarted(
                time_s=self._clock.now_s(),
                model="",
                device=worker.device,
                restarts=self._restarts[worker.device],
            )
        )
        self._owner.worker_ready(worker)


def _function(message: Message) -> FunctionId:
    return FunctionId(*message["function"])
