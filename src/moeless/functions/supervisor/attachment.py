"""One engine's attachment: the shared regions and doorbells between it, us and the workers."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moeless.core.model import ModelSpec
from moeless.functions.links import shared_memory
from moeless.functions.links.board import EngineBoard
from moeless.functions.links.channel import ChannelShape, hush, new_doorbell
from moeless.functions.links.messages import MAX_FDS, close_all
from moeless.functions.supervisor.worker_process import WorkerProcess

MAX_DEVICES = (MAX_FDS - 4) // 3
"""Devices whose descriptors fit into one message; see ``Attachment.engine_fds``."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where an engine is.

    Args:
        step: Its iteration, from 1; 0 before the first.
        layer: The layer whose gate spoke last, -1 between steps.
        used: Layers whose times of use have become visible, each with the step of the newest.
    """

    step: int
    layer: int
    used: tuple[tuple[int, int], ...]


class Attachment:
    """An engine that is attached.

    The supervisor keeps a descriptor of everything, so that a restarted worker gets the same
    regions and the engine need not know.

    Args:
        number: Unique among the supervisor's attachments.
        connection: The engine's socket.
        spec: Its model.
        shape: Sizes of its channel.
        num_devices: D.
        model_fd: The model's board; stays the caller's.
        latched: Whether the board shows the platform the engine's layer, and when the engine used
            what, as it was at the last ``look``: so all of one decision is made for one position.
    """

    def __init__(
        self,
        number: int,
        connection: socket.socket,
        *,
        spec: ModelSpec,
        shape: ChannelShape,
        num_devices: int,
        model_fd: int,
        latched: bool = False,
    ) -> None:
        self.number = number
        self.connection = connection
        self.spec = spec
        self.shape = shape
        board_shape = {
            "num_layers": spec.num_layers,
            "num_experts": spec.num_experts,
            "num_devices": num_devices,
        }
        self._model_fd = model_fd
        self._board_fd = shared_memory.create(
            "moeless-engine", EngineBoard.num_bytes(**board_shape)
        )
        self.board = EngineBoard(shared_memory.attach(self._board_fd), **board_shape)
        self._engine_layer = self.board.layer
        self._engine_used_ns_LED = self.board.used_ns_LED
        self._seen_step_L = np.zeros_like(self.board.used_step_L)
        self._latched = latched
        if latched:
            self._engine_layer[0] = -1  # no layer has run
            self.board.layer = self._engine_layer.copy()
            self.board.used_ns_LED = self._engine_used_ns_LED.copy()
        self._payload_fd = shared_memory.create("moeless-payload", shape.payload_bytes)
        self._mailbox_fds = [
            shared_memory.create("moeless-mailbox", shape.mailbox_bytes)
            for _ in range(num_devices)
        ]
        self._request_bells = [new_doorbell() for _ in range(num_devices)]
        self._answer_bells = [new_doorbell() for _ in range(num_devices)]
        self.load_bell = new_doorbell()

    def engine_fds(self) -> list[int]:
        """What the engine gets: boards, payload, load bell, then three per device."""
        return [self._model_fd, *self._own_fds()]

    def _own_fds(self) -> list[int]:
        fds = [self._board_fd, self._payload_fd, self.load_bell]
        for trio in zip(self._mailbox_fds, self._request_bells, self._answer_bells, strict=True):
            fds += trio
        return fds

    def connect(self, worker: WorkerProcess) -> None:
        """Attach a worker, which knows the model, to this engine."""
        device = worker.device
        message = {
            "op": "attach",
            "engine": self.number,
            "model": self.spec.model_id,
            "shape": self.shape.to_json(),
        }
        fds = [
            self._payload_fd,
            self._mailbox_fds[device],
            self._request_bells[device],
            self._answer_bells[device],
        ]
        worker.order(message, fds=fds)

    def look(self) -> Position:
        """See where the engine is; where the board is latched it shows that from now on."""
        self.board.layer[0] = self._engine_layer[0]
        used = tuple(self._look_at_use()) if self._latched else ()
        return Position(step=int(self.board.step[0]), layer=int(self.board.layer[0]), used=used)

    def _look_at_use(self) -> Iterator[tuple[int, int]]:
        """Show when the replicas of layers were used, but for layers that are being written."""
        step_L = self.board.used_step_L
        for layer in (step_L > self._seen_step_L).nonzero()[0].tolist():
            read = self.board.read_marked(step_L, layer, self._engine_used_ns_LED)
            if read is not None:
                step, (used_ns_ED,) = read
                self.board.used_ns_LED[layer] = used_ns_ED
                self._seen_step_L[layer] = step
                yield layer, step

    def quiet(self) -> None:
        """Take back the load bell's ring."""
        hush(self.load_bell)

    def close(self) -> None:
        """Give up the regions; they vanish when the engine and the workers have, too."""
        close_all(self._own_fds())
        self.connection.close()
