"""Workers that stand by, with all libraries loaded, to take the place of one that is lost.

Loading torch takes seconds of a core, more where the cores compute. A spare worker does that
beforehand and at the lowest priority. It has no device, no model and no weights.
"""

import logging
from dataclasses import replace

from moeless.errors import FunctionError
from moeless.functions.supervisor.config import WorkerConfig
from moeless.functions.supervisor.worker_launch import WorkerLaunch, launch_worker

_log = logging.getLogger(__name__)


class Spares:
    """Spare workers, all of one kind: that of the first worker that is started.

    Args:
        count: How many to keep; 0 for none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kind: WorkerConfig | None = None
        self._starting: list[WorkerLaunch] = []
        self._ready: list[WorkerLaunch] = []

    def pids(self) -> list[int]:
        """Process ids of those that could be put to work now."""
        self._look()
        return [spare.process.pid for spare in self._ready]

    def take(self, config: WorkerConfig) -> WorkerLaunch | None:
        """One that is ready to be the worker of a device, put to work; None if there is none."""
        if not self._count:
            return None
        if self._kind is None:
            self._kind = config
        if _kind(config) != _kind(self._kind) or not self.pids():
            return None
        spare = self._ready.pop()
        spare.put_to_work(config)
        return spare

    def tick(self) -> None:
        """Start what is missing; call it while no worker starts, which is more urgent."""
        self._look()
        if self._kind is not None and len(self._ready) + len(self._starting) < self._count:
            self._starting.append(launch_worker(self._kind, spare=True))

    def close(self) -> None:
        """End them."""
        for spare in (*self._ready, *self._starting):
            spare.kill()
        self._ready, self._starting = [], []

    def _look(self) -> None:
        """Find out which are ready, and part with those that have ended."""
        for spare in list(self._starting):
            try:
                if spare.has_reported():
                    self._starting.remove(spare)
                    self._ready.append(spare)
            except FunctionError:
                _log.warning("a spare worker ended before it was ready")
                self._starting.remove(spare)
                spare.kill()
        for spare in [spare for spare in self._ready if spare.process.poll() is not None]:
            self._ready.remove(spare)
            spare.kill()


def _kind(config: WorkerConfig) -> WorkerConfig:
    """What a spare worker must be started with; the rest it is told when it is put to work."""
    return replace(config, torch_device="", budget_bytes=0, cores=())
