"""A model as the supervisor knows it: where its weights are, who can serve it, who uses it."""

import dataclasses
from collections.abc import Collection

from moeless.core.model import ModelSpec
from moeless.errors import FunctionError
from moeless.functions.links import shared_memory
from moeless.functions.links.board import ModelBoard
from moeless.functions.links.messages import Message, close_all
from moeless.functions.planning.load_intake import LoadConsumer, LoadIntake
from moeless.functions.planning.load_sum import LoadSum
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.supervisor.attachment import Attachment
from moeless.functions.supervisor.worker_process import WorkerProcess

_SAME_FOR_ALL = {
    "policy": "options of the policy: --policy, --predictor, --memory-factor and the like",
    "lookahead": "--distance and --predictor",
    "share": "--memory-share",
    "keep_alive": "--keep-alive and --keep-alive-rule",
}
"""What the engines of a model must ask for alike, and the options that say it."""


@dataclasses.dataclass(kw_only=True)
class Joined:
    """An engine from its attach request on; it takes part once it has an intake.

    Args:
        attachment: Its regions and doorbells.
        request: Its attach request.
        intake: Where its loads go.
    """

    attachment: Attachment
    request: Message
    intake: LoadIntake | None = None


class HostedModel:
    """A model from its first engine's attach request on.

    Args:
        spec: The model.
        request: The first engine's.
        num_devices: D.
    """

    def __init__(self, spec: ModelSpec, request: Message, *, num_devices: int) -> None:
        self.spec = spec
        self.request = request
        self.source = source_of(request)
        self.engines: dict[int, Joined] = {}
        self.function_bytes = 0
        self.placement: ModelPlacement | None = None
        """On the platform, once all workers know the model."""
        self.consumer: LoadConsumer | None = None
        self.loads: LoadSum | None = None
        self._planned_for: list[int] | None = None
        self._knowing: dict[int, WorkerProcess] = {}
        shape = {
            "num_layers": spec.num_layers,
            "num_experts": spec.num_experts,
            "num_devices": num_devices,
        }
        self.board_fd = shared_memory.create("moeless-model", ModelBoard.num_bytes(**shape))
        self.board = ModelBoard(shared_memory.attach(self.board_fd), **shape)

    def check(self, spec: ModelSpec, request: Message) -> None:
        """Refuse an engine that cannot share the model's instances or plans.

        Raises:
            FunctionError: It cannot; the message says why.
        """
        source, model_id = source_of(request), self.spec.model_id
        if source != self.source:
            raise FunctionError(
                f"{model_id} is known here from {self.source[0]}, not from {source[0]}; "
                f"serve it under another model id"
            )
        if spec != self.spec:
            raise FunctionError(f"another model is known here as {model_id}")
        for other in self.engines.values():
            for name, options in _SAME_FOR_ALL.items():
                if request.get(name) != other.request.get(name):
                    raise FunctionError(
                        f"engines of {model_id} are attached that share its instances: give "
                        f"this one the same {options}"
                    )

    def learned_by(self, worker: WorkerProcess) -> bool:
        """A worker knows the model; returns whether that is new."""
        new = self._knowing.get(worker.device) is not worker
        self._knowing[worker.device] = worker
        return new

    def forgotten_by(self, device: int) -> None:
        """The worker of a device is gone, and what it knew."""
        self._knowing.pop(device, None)

    def is_known_by(self, worker: WorkerProcess) -> bool:
        """Whether a worker can serve the model."""
        return self._knowing.get(worker.device) is worker

    def is_known_by_all(self, devices: Collection[int]) -> bool:
        """Whether the workers of some devices, at least of one, can all serve the model."""
        return bool(devices) and self._knowing.keys() >= set(devices)

    def introduction(self) -> Message:
        """The order that tells a worker about the model."""
        fields = ("spec", "layout", "directory")
        return {
            "op": "model",
            "model": self.spec.model_id,
            **{name: self.request[name] for name in fields},
        }

    def plan(self) -> None:
        """Have all layers planned for what the devices may hold of the model now."""
        if self.consumer is not None and self.placement is not None:
            self._planned_for = self.placement.capacity_D(0).tolist()
            self.consumer.start()

    def follow_capacity(self) -> None:
        """Have plans that do not follow loads made again if the devices may hold more or less."""
        if self.consumer is None or self.consumer.adaptive or self.placement is None:
            return
        if self.placement.capacity_D(0).tolist() != self._planned_for:
            self.plan()

    def close(self) -> None:
        """Give up the board; it vanishes when its engines have, too."""
        close_all([self.board_fd])

    def connect(self, worker: WorkerProcess) -> None:
        """Attach a worker to all engines of the model that take part."""
        for joined in self.engines.values():
            if joined.intake is not None:
                joined.attachment.connect(worker)


def source_of(request: Message) -> tuple[str, str]:
    """Where the weights of a model are, as an attach request says it."""
    return str(request["directory"]), str(request["layout"])
