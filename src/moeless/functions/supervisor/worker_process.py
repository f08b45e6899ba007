"""The worker of one device as the supervisor sees it: orders and answers. A ``HostPort``."""

import contextlib
import time
from collections.abc import Mapping, Sequence

from moeless.core.model import FunctionId
from moeless.functions.links.messages import Message, send
from moeless.functions.supervisor.config import WorkerConfig
from moeless.functions.supervisor.worker_launch import WorkerLaunch, launch_worker

_ANSWERED = frozenset({"model", "load", "evict", "attach"})
"""Orders that a worker answers, in the order in which it got them."""


class WorkerProcess:
    """A worker that has been started.

    Args:
        device: Device index.
        config: How to run it.
        generation: How many workers the device has had before.
        digests: Of functions' weights when they were first loaded; kept by the owner.
        launch: A process that was started before; None starts one.
    """

    def __init__(
        self,
        device: int,
        config: WorkerConfig,
        *,
        generation: int,
        digests: Mapping[FunctionId, str],
        launch: WorkerLaunch | None = None,
    ) -> None:
        self._digests = digests
        self.device = device
        self.generation = generation
        self.ready = False
        self.peak_bytes = 0  # the most its instances have held, by its own count
        self.open_orders = 0
        self.stirred_s = 0.0  # when it last answered an order, or got one while it had none
        self.launch = launch or launch_worker(config)
        self.process = self.launch.process
        self.connection = self.launch.connection
        self.pulse = self.launch.pulse

    def order(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        """Send an order; a worker that is gone is noticed elsewhere, by its closed connection."""
        if message["op"] in _ANSWERED:
            if not self.open_orders:
                self.stirred_s = time.monotonic()
            self.open_orders += _answers(message)
        with contextlib.suppress(OSError):
            send(self.connection, message, fds=fds)

    def note_answer(self, message: Message) -> None:
        """An order has been answered, or some of its loads."""
        self.open_orders -= _answers(message)
        self.stirred_s = time.monotonic()

    def kill(self) -> None:
        """End it now."""
        self.launch.kill()

    def load(self, *functions: FunctionId) -> None:
        """Begin to load."""
        digests = [self._digests.get(function) for function in functions]
        self.order({"op": "load", "functions": functions, "digests": digests})

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict."""
        self.order({"op": "evict", "function": function, "reason": reason})


def _answers(message: Message) -> int:
    """How many answers an order asks for, or a message gives: one for each of its loads."""
    functions = message.get("functions")
    return 1 if functions is None else len(functions)
