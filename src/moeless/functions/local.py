"""The platform inside the engine's own process: one thread plans, one per device loads.

For one process on one machine (tests, notebooks, a single GPU). Needs torch only through the
hosts it is given.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from moeless.core.model import FunctionId, ModelSpec
from moeless.core.ports import Clock, EventSink, KeepAlive
from moeless.errors import FunctionError, UnavailableError
from moeless.functions.host.order_queue import IdleHost, OrderQueue
from moeless.functions.links.board import Board
from moeless.functions.links.client import Report, describe_wait
from moeless.functions.planning.load_intake import LoadConsumer, LoadIntake
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.load_limits import BATCH_BYTES, LoadLimits

_TICK_S = 0.25


class Loader(IdleHost, Protocol):
    """The part of a host that loads need."""

    def load(self, function: FunctionId) -> int:
        """Make an instance warm; returns its bytes."""
        ...

    def evict(self, function: FunctionId) -> None:
        """Give an instance up."""
        ...


class _LoaderThread:
    """Carries out one device's orders in sequence. A ``platform.HostPort``."""

    def __init__(self, device: int, host: Loader, tasks: "queue.SimpleQueue[_Task]") -> None:
        self._device = device
        self._host = host
        self._tasks = tasks
        self._orders: OrderQueue[Callable[[], None] | None] = OrderQueue(host)
        self._thread = threading.Thread(target=self._run, name=f"loader-{device}", daemon=True)
        self._thread.start()

    def load(self, *functions: FunctionId) -> None:
        """Begin to load."""
        self._orders.put(lambda: self._load(functions))

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict."""
        self._orders.put(lambda: self._evict(function, reason))

    def close(self) -> None:
        """End after the order in hand."""
        self._orders.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (order := self._orders.take()) is not None:
            order()

    def _load(self, functions: Sequence[FunctionId]) -> None:
        loaded = []
        for function in functions:
            try:
                self._host.load(function)
                loaded.append(function)
            except Exception as error:  # noqa: BLE001 - whatever it was, tokens wait for an answer
                self._report_failure(function, str(error) or type(error).__name__)
        if loaded:
            self._tasks.put(lambda p: p.loaded(self._device, *loaded))

    def _report_failure(self, function: FunctionId, reason: str) -> None:
        self._tasks.put(lambda p: p.failed(self._device, function, reason=reason))

    def _evict(self, function: FunctionId, reason: str) -> None:
        self._host.evict(function)
        self._tasks.put(lambda p: p.evicted(self._device, function, reason=reason))


_Task = Callable[[Platform], None]


class LocalClient:
    """Runs a platform in a thread. A ``links.client.PlatformClient``.

    Args:
        spec: The model.
        hosts: One per device.
        budgets_bytes: Budget of each device [D].
        function_bytes: Bytes of one instance.
        clock: The time.
        keep_alive: How long idle instances stay.
        sink: Receives events.
        make_controller: Builds the control loop.

    Raises:
        BudgetError: The devices cannot hold one layer's experts at once.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hosts: Sequence[Loader],
        *,
        budgets_bytes: Sequence[int],
        function_bytes: int,
        clock: Clock,
        keep_alive: KeepAlive,
        sink: EventSink,
        make_controller: Callable[[ModelPlacement], LoadConsumer],
    ) -> None:
        self._board = Board.in_process(
            num_layers=spec.num_layers, num_experts=spec.num_experts, num_devices=len(hosts)
        )
        self._function_bytes = function_bytes
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._tickets = itertools.count(1)
        self._demanded: dict[int, str | None] = {}
        self._waits_for: tuple[int, list[int]] = (0, [])
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._loads_pending = False
        self._platform = Platform(
            budgets_bytes,
            clock=clock,
            keep_alive=keep_alive,
            sink=sink,
            limits=LoadLimits(batch_bytes=BATCH_BYTES),
        )
        self._model = self._platform.add_model(
            spec, function_bytes=function_bytes, board=self._board
        )
        self._platform.join(self._model, 0, self._board)
        controller = make_controller(self._model)
        self._wants_loads = controller.adaptive
        self._intake = LoadIntake(self._board, controller)
        self._loaders = [_LoaderThread(d, host, self._tasks) for d, host in enumerate(hosts)]
        for device, loader in enumerate(self._loaders):
            self._platform.device_up(device, loader)
        self._tasks.put(lambda _: controller.start())
        self._thread = threading.Thread(target=self._run, name="platform", daemon=True)
        self._thread.start()

    @property
    def board(self) -> Board:
        """The shared arrays."""
        return self._board

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self._loaders)

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
        if not self._loads_pending:
            self._loads_pending = True
            self._tasks.put(self._take_loads)

    def demand(self, *, layer: int, experts: list[int]) -> int:
        """Ask for experts without a warm replica; returns a ticket at once."""
        ticket = next(self._tickets)
        self._waits_for = layer, experts
        self._tasks.put(
            lambda p: p.demand(self._model, ticket=ticket, layer=layer, experts=experts)
        )
        return ticket

    def await_demand(self, ticket: int, *, timeout_s: float) -> None:
        """Wait until the demanded experts are warm.

        Raises:
            UnavailableError: An expert cannot be made warm anywhere, or it took too long.
            FunctionError: The platform has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: ticket in self._demanded or self._failure, timeout=timeout_s
            )
            if self._failure:
                raise FunctionError(self._failure)
            if ticket not in self._demanded:
                raise UnavailableError(describe_wait(*self._waits_for, timeout_s))
            error = self._demanded.pop(ticket)
        if error is not None:
            raise UnavailableError(error)

    def check_alive(self) -> None:
        """Look whether the platform's thread still works.

        Raises:
            FunctionError: It has failed.
        """
        if self._failure is not None:
            raise FunctionError(self._failure)

    def report(self) -> Report:
        """Counters of the platform. May be called from any thread."""
        done = threading.Event()
        result: Report = {}

        def fill(_platform: Platform) -> None:
            result.update(self._model.report(0))
            done.set()

        self._tasks.put(fill)
        if not done.wait(timeout=5.0):
            raise FunctionError(self._failure or "the platform does not answer")
        none = [0] * len(self._loaders)
        return result | {"worker_restarts": none, "worker_peak_bytes": none, "worker_pids": []}

    def close(self) -> None:
        """Stop the threads."""
        if not self._closed:
            self._closed = True
            self._tasks.put(lambda _: None)
            self._thread.join(timeout=5.0)
            for loader in self._loaders:
                loader.close()

    def _take_loads(self, _platform: Platform) -> None:
        self._loads_pending = False
        self._intake.take()

    def _run(self) -> None:
        next_tick_s = time.monotonic() + _TICK_S
        while not self._closed:
            task: _Task | None = None
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(timeout=max(0.0, next_tick_s - time.monotonic()))
            try:
                if task is not None:
                    task(self._platform)
                if time.monotonic() >= next_tick_s:
                    self._platform.tick()
                    self._platform.speeds.take()
                    next_tick_s = time.monotonic() + _TICK_S
            except Exception as error:
                with self._changed:
                    self._failure = f"the platform failed: {error}"
                    self._changed.notify_all()
                raise
            finished = self._platform.finished()
            if finished:
                with self._changed:
                    for result in finished:
                        self._demanded[result.ticket] = result.error
                    self._changed.notify_all()
