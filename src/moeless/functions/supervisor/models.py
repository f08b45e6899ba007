"""The models that a supervisor's workers know: how they learn them, and how they forget them.

It knows nothing of connections: their owner is told when a model can be used, or cannot.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from moeless.core.model import ModelSpec
from moeless.functions.links.messages import Message
from moeless.functions.platform.platform import Platform
from moeless.functions.supervisor.fleet import Fleet
from moeless.functions.supervisor.hosted_model import HostedModel
from moeless.functions.supervisor.worker_process import WorkerProcess

_log = logging.getLogger(__name__)
_START_TRIES = 3
"""Workers that may fail in a row before an engine that waits for them is refused."""
_TICKS_PER_TRY = 8
"""Looks around between two attempts to have a worker serve a model that it could not serve."""


class HostedModels:
    """Models by id. A ``fleet.FleetOwner``.

    Args:
        platform: Where models live.
        on_known: All workers know a model that is not on the platform yet.
        on_refused: A model cannot be served here, with the reason.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        on_known: Callable[[HostedModel], None],
        on_refused: Callable[[HostedModel, str], None],
    ) -> None:
        self._platform = platform
        self._on_known = on_known
        self._on_refused = on_refused
        self._models: dict[str, HostedModel] = {}
        self._ticks = 0
        self.fleet: Fleet | None = None
        """The workers; set once, before the first message."""

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(list(self._models.values()))

    def find(self, model_id: str) -> HostedModel | None:
        """A model that is known here, if it is."""
        return self._models.get(model_id)

    def add(self, spec: ModelSpec, request: Message) -> HostedModel:
        """Have all workers learn a model."""
        model = HostedModel(spec, request, num_devices=self._fleet.num_devices)
        self._models[spec.model_id] = model
        for worker in self._fleet:
            if worker.ready:
                worker.order(model.introduction())
        return model

    def drop(self, model: HostedModel) -> None:
        """Forget a model that has never come onto the platform."""
        assert model.placement is None
        if self._models.get(model.spec.model_id) is model:
            del self._models[model.spec.model_id]
            model.close()

    def workers_of(self, model: HostedModel) -> Iterator[WorkerProcess]:
        """The workers that can serve a model now."""
        return (worker for worker in self._fleet if model.is_known_by(worker))

    def describe(self) -> list[dict[str, Any]]:
        """All models as JSON objects."""
        return [self._describe(model) for model in self]

    def _describe(self, model: HostedModel) -> dict[str, Any]:
        placement = model.placement
        held: list[int] = []
        if placement is not None:
            of_model = model.spec.model_id
            everything = (i for pool in self._platform.pools for i in pool.instances())
            held = [i.num_bytes for i in everything if i.function.model == of_model]
        return {
            "model": model.spec.model_id,
            "engines": len(model.engines),
            "state": _state_of(model),
            "share": str(placement.share) if placement is not None else "",
            "guaranteed_bytes": 0
            if placement is None
            else sum(placement.share.bytes_of(p.budget_bytes) for p in self._platform.pools),
            "held_bytes": sum(held),
            "instances": len(held),
            "directory": model.source[0],
        }

    # Workers

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker takes orders: tell it about all models, those without engines included."""
        for model in self:
            worker.order(model.introduction())
        self._take_in(worker)

    def worker_knows_model(self, worker: WorkerProcess, message: Message) -> None:
        """A worker knows a model, or cannot serve it."""
        model = self._models.get(str(message["model"]))
        if model is None:
            return  # its engine has left in the meantime
        if "error" in message:
            if model.placement is None:
                self._on_refused(model, str(message["error"]))
            else:
                self._bar(model, worker, str(message["error"]))
            return
        if model.learned_by(worker):
            model.function_bytes = max(model.function_bytes, int(message["function_bytes"]))
            model.connect(worker)  # before any instance that its engines may invoke
        if model.placement is not None:
            self._platform.unbar(model.placement, worker.device)
            self._take_in(worker)
        elif model.is_known_by_all(self._fleet.awaited):
            self._on_known(model)

    def worker_lost(self, device: int, *, reason: str, failures: int) -> None:
        """A device has lost its worker: its successor has to learn the models, too."""
        for model in self:
            model.forgotten_by(device)
            if model.placement is None and failures >= _START_TRIES:
                error = f"the worker of device {device} does not start: {reason}"
                self._on_refused(model, error)
        self._replan_fixed()

    def tick(self) -> None:
        """Follow what models leave each other; try workers again that could not serve a model."""
        for model in self:
            model.follow_capacity()
        self._ticks += 1
        if self._ticks % _TICKS_PER_TRY:
            return
        for model in self:
            for worker in self._fleet:
                if model.placement is not None and worker.device in model.placement.barred:
                    worker.order(model.introduction())

    def _take_in(self, worker: WorkerProcess) -> None:
        """A worker knows all models, or why it cannot serve them: it may carry out orders."""
        for model in self:
            placement = model.placement
            if placement is None or model.is_known_by(worker):
                continue
            if worker.device not in placement.barred:
                return
        if worker.device not in self._platform.orders.hosts:
            self._platform.device_up(worker.device, worker)
        self._replan_fixed()

    def _bar(self, model: HostedModel, worker: WorkerProcess, reason: str) -> None:
        """A restarted worker cannot serve a model, whose files are damaged as a rule."""
        assert model.placement is not None
        if worker.device not in model.placement.barred:
            _log.warning(
                "device %d cannot serve %s: %s", worker.device, model.spec.model_id, reason
            )
        self._platform.bar(model.placement, worker.device, reason=reason)
        self._take_in(worker)

    def worker_retired(self, device: int) -> None:
        """A device has left: no engine waits for its worker any more."""
        for model in self:
            model.forgotten_by(device)
            if model.placement is None and model.is_known_by_all(self._fleet.awaited):
                self._on_known(model)

    def replan(self) -> None:
        """Plan all models again: other devices are in use, or budgets have changed."""
        for model in self:
            model.plan()

    def _replan_fixed(self) -> None:
        """Plans that do not follow loads still follow devices."""
        for model in self:
            if model.consumer is not None and not model.consumer.adaptive:
                model.plan()

    @property
    def _fleet(self) -> Fleet:
        assert self.fleet is not None
        return self.fleet


def _state_of(model: HostedModel) -> str:
    placement = model.placement
    if placement is None:
        return "starting"
    if not model.engines:
        return "left"
    if placement.is_busy():
        return "busy"
    return "asleep" if placement.activity.is_asleep() else "idle"
