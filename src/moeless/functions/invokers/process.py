"""Invoke instances in worker processes, through shared memory."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.functions.invokers.patience import NOTED_FROM_NS, Patience, Work
from moeless.functions.links.channel import ChannelShape, await_answer, ring
from moeless.functions.links.payload import Payload
from moeless.functions.links.segment_status import NOT_WARM
from moeless.functions.supervisor.client import SupervisorClient
from moeless.functions.token_path.dispatch import Answer

_GLANCE_S = 0.05
"""How often a wait looks whether the device is still there."""
_GLANCES_PER_DOUBT = 4
"""After so many looks the supervisor is asked to look, too."""

_sched_getcpu: Any = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def _current_core() -> int:
    """The core that this thread runs on, or -1 where the system does not say."""
    return int(_sched_getcpu()) if _sched_getcpu is not None else -1


class ProcessInvoker:
    """Posts work to the workers' mailboxes.

    Args:
        client: The attachment that owns the channel.
        shape: Sizes of the channel.
        spin_s: How long to look for answers before sleeping.
        patience: How long workers may take.
        cores: The cores that each worker stays on; empty for a worker that may move, none for one
            that joins later.
    """

    def __init__(
        self,
        client: SupervisorClient,
        shape: ChannelShape,
        *,
        patience: Patience,
        spin_s: float = 0.0,
        cores: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._client = client
        self._payload = Payload(client.payload_region, shape)
        self._spin_s = spin_s
        self._patience = patience
        self._cores = [set(own) for own in cores or ()]
        self._cores += [set()] * (client.num_devices - len(self._cores))
        self._posted: list[tuple[int, int, int, int]] = []
        self._segments: Sequence[NDArray[np.int32]] = ()
        self._rows = 0
        self.shape = shape
        self.max_rows = shape.max_rows

    def begin(
        self,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments: Sequence[NDArray[np.int32]],
        y_SH: torch.Tensor | None = None,
    ) -> None:
        """Send the work to the devices that have some.

        A ``y_SH`` that an earlier answer returned means that this is the rest of the same layer:
        the rows are in shared memory already.
        """
        if y_SH is None:
            self._payload.x_TH[: len(x_TH)].copy_(x_TH)
            self._payload.token_S[: len(token_S)].copy_(token_S)
        self._rows = len(token_S)
        self._segments = segments
        self._posted = []
        board = self._client.board
        if board.fence is not None:
            board.fence()  # a worker that was seen to be warm has been counted by now
        for device, segments_n3 in enumerate(segments):
            if len(segments_n3):
                generation = int(board.device_generation_D[device])
                seq = self._client.mailboxes[device].post(
                    layer=layer, rows=len(x_TH), segments_n3=segments_n3
                )
                self._posted.append((device, seq, generation, len(segments_n3)))
        if len(self._posted) > 1:
            # A worker that is woken takes its core at once. If that is ours, the others have to
            # have been woken before, or they would wait until it has finished.
            here = _current_core()
            self._posted.sort(key=lambda posted: here in self._cores[posted[0]])
        for device, *_ in self._posted:
            ring(self._client.request_bells[device])

    def finish(self) -> Answer:
        """Wait for all answers; a device that dies or hangs answers NOT_WARM for all it had."""
        status = [np.zeros(len(s), dtype=np.uint8) for s in self._segments]
        busy_ns = [0] * len(self._segments)
        for device, seq, generation, n in self._posted:
            mailbox = self._client.mailboxes[device]
            if self._await(device, seq, generation):
                status[device][:] = mailbox.status_n[:n]
                busy_ns[device] = mailbox.busy_ns
                if busy_ns[device] >= NOTED_FROM_NS:
                    self._patience.note(device, self._work_of(device), busy_ns[device])
            else:
                status[device][:] = NOT_WARM
        self._posted = []
        return Answer(y_SH=self._payload.y_SH[: self._rows], status=status, busy_ns=busy_ns)

    def _await(self, device: int, seq: int, generation: int) -> bool:
        mailbox, bell = self._client.mailboxes[device], self._client.answer_bells[device]
        board = self._client.board
        glances = 0
        while not await_answer(mailbox, seq, bell, spin_s=self._spin_s, timeout_s=_GLANCE_S):
            self._client.check_alive()
            gone = not board.device_up_D[device]
            if gone or board.device_generation_D[device] != generation:
                return mailbox.has_answered(seq)
            glances += 1
            if glances % _GLANCES_PER_DOUBT == 0:
                # One that hangs may still write into the shared rows: it has to be gone before
                # they are given to somebody else, so wait until the supervisor has replaced it.
                # Looks are counted, not seconds: while we stood still, so did it perhaps.
                self._client.doubt(
                    device,
                    allowed_s=self._patience.allowed_s(device, self._work_of(device)),
                    waited_s=glances * _GLANCE_S,
                )
        return True

    def _work_of(self, device: int) -> Work:
        segments_n3 = self._segments[device]
        rows = int(segments_n3[:, 2].sum() - segments_n3[:, 1].sum())
        return Work(rows=rows, experts=len(segments_n3))

    def close(self) -> None:
        """Nothing to give back; the client owns the channel."""
