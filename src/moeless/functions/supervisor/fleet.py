"""The workers of a supervisor: their start, their messages, their loss, their restart, their end.

It decides nothing about instances: what workers report goes to the platform. It must not know
engines; their owner is told what workers know and which devices were lost.
"""

import dataclasses
import logging
import selectors
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from moeless.core.events import WorkerLost, WorkerStarted
from moeless.core.model import FunctionId
from moeless.core.ports import Clock, EventSink
from moeless.errors import ConfigError, FunctionError, os_reason
from moeless.functions.links.messages import Message, close_all, receive
from moeless.functions.platform.platform import Platform
from moeless.functions.supervisor.config import SupervisorConfig, WorkerConfig
from moeless.functions.supervisor.slot import Slot, SlotState
from moeless.functions.supervisor.spares import Spares
from moeless.functions.supervisor.vital_signs import (
    OpenWork,
    VitalSigns,
    allowed_silence_s,
    find_hang,
    is_runnable,
)
from moeless.functions.supervisor.worker_process import WorkerProcess

_log = logging.getLogger(__name__)
_STEADY_S = 30.0
"""A worker that lived this long is no failure in a row: the shortest wait follows."""
_LONGEST_WAIT_S = 30.0
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

    def worker_retired(self, device: int) -> None:
        """A device has left; no new worker will start."""
        ...

    def worker_lost(self, device: int, *, reason: str, failures: int) -> None:
        """A device has lost its worker, for the n-th time in a row; a new one will start."""
        ...


class Fleet:
    """One worker process per device that is in use; slots for those that may join.

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
        self._open_work: dict[int, dict[int, OpenWork]] = {}  # by device and engine
        self._digests: dict[FunctionId, str] = {}
        self.slots = [Slot(device=device) for device in range(config.num_slots)]
        """By device."""
        self._last_tick_s = self._awake_s = clock.now_s()
        self._handlers: dict[str, Callable[[WorkerProcess, Message], None]] = {
            "ready": self._ready,
            "model": owner.worker_knows_model,
            "attached": lambda *_: None,
            "loaded": self._loaded,
            "failed": lambda w, m: platform.failed(
                w.device, _function(m), reason=m["reason"], elsewhere=m["elsewhere"]
            ),
            "evicted": lambda w, m: platform.evicted(w.device, _function(m), reason=m["reason"]),
        }

    def __iter__(self) -> Iterator[WorkerProcess]:
        """The workers that live, ready or not."""
        return iter(list(self._workers.values()))

    @property
    def num_devices(self) -> int:
        """D, devices that may join included."""
        return len(self.slots)

    @property
    def awaited(self) -> set[int]:
        """Devices whose workers are there, or on their way; engines wait for those."""
        return {slot.device for slot in self.slots if slot.is_awaited}

    def worker(self, device: int) -> WorkerProcess | None:
        """The worker of a device, if it has one."""
        return self._workers.get(device)

    def report(self) -> Message:
        """Workers as part of an engine's report; lists are by device."""
        workers = [self._workers.get(slot.device) for slot in self.slots]
        return {
            "worker_restarts": [slot.restarts for slot in self.slots],
            "worker_peak_bytes": [w.peak_bytes if w else 0 for w in workers],
            "worker_pids": [w.process.pid if w else None for w in workers],
            "spare_pids": self._spares.pids(),
            "device_states": [slot.state for slot in self.slots],
            "device_labels": [slot.label for slot in self.slots],
        }

    def describe_workers(self) -> list[dict[str, Any] | None]:
        """How workers run, by device, for engines that attach; None where nobody is."""
        return [
            None if slot.config is None or slot.is_free else dataclasses.asdict(slot.config)
            for slot in self.slots
        ]

    def start(self) -> None:
        """Start the workers that are there from the beginning."""
        for slot, config in zip(self.slots, self._config.workers, strict=False):
            slot.config, slot.joined = config, True
            self._start(slot)

    def add(self, config: WorkerConfig) -> Slot:
        """Start a worker in a free slot; the device is not in use before it is ready.

        Raises:
            ConfigError: There is no free slot.
            FunctionError: The system has no process to give.
        """
        slot = next((slot for slot in self.slots if slot.is_free), None)
        if slot is None:
            raise ConfigError(
                f"all {len(self.slots)} slots for devices are taken; drain a device, or start the "
                f"pool with a larger --max-devices"
            )
        slot.config, slot.joined, slot.note, slot.failures = config, False, "", 0
        try:
            self._start(slot)
        except OSError as error:  # no memory or no descriptor is left
            raise FunctionError(f"no worker can be started: {os_reason(error)}") from error
        return slot

    def retire(self, slot: Slot) -> None:
        """End a worker that nobody needs any more, or whose device is given up."""
        worker = self._workers.pop(slot.device, None)
        if worker is not None:
            self._selector.unregister(worker.connection)
            worker.kill()
        slot.restart_at_s, slot.joined, slot.state = None, False, SlotState.DRAINED
        self._platform.device_down(slot.device)
        self._owner.worker_retired(slot.device)

    def tick(self) -> None:
        """Start what is due again; give up what does not start."""
        now_s = self._clock.now_s()
        self._start_due(now_s)
        since_s = now_s - self._last_tick_s
        self._last_tick_s = now_s
        if since_s > _PAUSE_S:
            self._awake_s = now_s  # we were stopped, and workers perhaps with us
        if since_s > _HICCUP_S:
            self._open_work.clear()  # for a silence this short nobody is given up then
        for worker in self:
            reason = self._find_fault(worker, now_s)
            if reason is not None:
                self.lose(worker, reason)
        self._open_work.clear()  # whose tokens still wait is said again
        if all(slot.state is not SlotState.STARTING for slot in self.slots):
            self._spares.tick()

    def doubt(self, device: int, *, engine: int, work: OpenWork) -> None:
        """Tokens wait for a device's worker: see soon whether it lives and gets on.

        Args:
            device: Which.
            engine: Whose tokens.
            work: What it was sent.
        """
        self._open_work.setdefault(device, {})[engine] = work

    def _look_at(self, worker: WorkerProcess, now_s: float) -> VitalSigns:
        open_work, pulse = self._open_work.get(worker.device, {}), worker.pulse
        silent_s, tokens_wait = now_s - max(pulse.last_s(), self._awake_s), bool(open_work)
        least_s = allowed_silence_s(
            self._config.silence_s, tokens_wait=tokens_wait, is_runnable=False
        )
        return VitalSigns(
            silent_s=silent_s,
            # Asked only where it makes a difference.
            is_runnable=silent_s > least_s and is_runnable(worker.process.pid),
            tokens_wait=tokens_wait,
            open_work=[work for engine, work in open_work.items() if pulse.serves(engine)],
            serving_s=now_s - max(pulse.serving_since_s(), self._awake_s),
        )

    def _find_fault(self, worker: WorkerProcess, now_s: float) -> str | None:
        """Why a worker has to be replaced, if it has."""
        config = self._config
        started_s = self.slots[worker.device].started_s
        if not worker.ready:
            late = now_s - started_s > config.start_timeout_s
            return f"did not start within {config.start_timeout_s:g} s" if late else None
        hang = find_hang(self._look_at(worker, now_s), config.silence_s)
        if hang is not None:
            return hang
        stirred_s = max(worker.stirred_s, self._awake_s)
        if worker.open_orders and now_s - stirred_s > config.order_timeout_s:
            return f"did not carry out an order within {config.order_timeout_s:g} s"
        return None

    def lose(self, worker: WorkerProcess, reason: str) -> None:
        """A worker is gone, or given up: its tokens go elsewhere, a new one is started later."""
        device = worker.device
        if self._workers.get(device) is not worker:
            return
        slot, now_s = self.slots[device], self._clock.now_s()
        self._sink.emit(WorkerLost(time_s=now_s, model="", device=device, reason=reason))
        slot.restarts += 1
        if slot.state is SlotState.DRAINING:
            _log.warning("worker of device %d lost while it was drained (%s)", device, reason)
            self.retire(slot)
            return
        if not slot.joined:
            _log.warning("device %d does not join: its worker was lost (%s)", device, reason)
            self.retire(slot)
            slot.state, slot.note = SlotState.DOWN, f"did not join: {reason}"
            return
        del self._workers[device]
        self._selector.unregister(worker.connection)
        worker.kill()
        self._platform.device_down(device, returns=True)
        if worker.ready and now_s - slot.started_s >= _STEADY_S:
            slot.failures = 0
        wait_s = min(_LONGEST_WAIT_S, self._config.restart_backoff_s * 2 ** min(slot.failures, 10))
        if not slot.failures and self._spares.pids():
            wait_s = 0.0  # it costs next to nothing
        slot.failures += 1
        slot.state, slot.restart_at_s = SlotState.STARTING, now_s + wait_s
        _log.warning("worker of device %d lost (%s), restart in %.1f s", device, reason, wait_s)
        self._owner.worker_lost(device, reason=reason, failures=slot.failures)
        self._start_due(now_s)

    def close(self) -> None:
        """End all workers now."""
        for worker in self:
            worker.kill()
        self._spares.close()

    def _start_due(self, now_s: float) -> None:
        for slot in self.slots:
            if slot.restart_at_s is not None and now_s >= slot.restart_at_s:
                slot.restart_at_s = None
                self._start(slot)

    def _start(self, slot: Slot) -> None:
        assert slot.config is not None
        worker = WorkerProcess(
            slot.device,
            slot.config,
            generation=slot.restarts,
            digests=self._digests,
            launch=self._spares.take(slot.config),
        )
        self._workers[slot.device] = worker
        slot.state, slot.started_s = SlotState.STARTING, self._clock.now_s()
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
            worker.note_answer(message)
        self._handlers[message["op"]](worker, message)

    def _loaded(self, worker: WorkerProcess, message: Message) -> None:
        functions = [FunctionId(*each) for each in message["functions"]]
        for function, digest in zip(functions, message["digests"], strict=True):
            self._digests.setdefault(function, str(digest))
        self._platform.loaded(worker.device, *functions)

    def _ready(self, worker: WorkerProcess, _message: Message) -> None:
        worker.ready = True
        self._sink.emit(
            WorkerStarted(
                time_s=self._clock.now_s(),
                model="",
                device=worker.device,
                restarts=self.slots[worker.device].restarts,
            )
        )
        self._owner.worker_ready(worker)


def _function(message: Message) -> FunctionId:
    return FunctionId(*message["function"])
