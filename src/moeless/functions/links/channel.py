"""How tokens travel between one engine and the workers of its devices.

One *payload* region is shared by the engine and all workers: input rows, the assignment table and
the output rows. Every assignment (token, expert) has one output row, whoever computes it: so work
can be split anywhere, repeated elsewhere after a failure, and never counts twice.

Each worker also has a small *mailbox*: the request (which rows, which experts) and its answer.
A doorbell (eventfd) wakes the reader. A sequence number is written last, so a reader that sees it
sees the rest, whether the doorbell woke it or it looked by itself (``ordering``).
"""

import os
import select
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.model import DTYPE_BYTES
from moeless.functions.links.ordering import new_fence

_HEADER = 8
"""int64 words at the head of a mailbox."""


@dataclass(frozen=True, kw_only=True)
class ChannelShape:
    """Sizes of an engine's channel.

    Args:
        max_rows: Input rows that fit.
        max_assignments: Output rows that fit.
        hidden: H.
        dtype: Of the rows.
        num_experts: E, which bounds the segments of one request.
    """

    max_rows: int
    max_assignments: int
    hidden: int
    dtype: str
    num_experts: int

    @property
    def x_bytes(self) -> int:
        """Bytes of the input rows, padded to a cache line."""
        return _padded(self.max_rows * self.hidden * DTYPE_BYTES[self.dtype])

    @property
    def token_bytes(self) -> int:
        """Bytes of the assignment table."""
        return _padded(self.max_assignments * 8)

    @property
    def y_bytes(self) -> int:
        """Bytes of the output rows."""
        return _padded(self.max_assignments * self.hidden * DTYPE_BYTES[self.dtype])

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload region."""
        return self.x_bytes + self.token_bytes + self.y_bytes

    @property
    def mailbox_bytes(self) -> int:
        """Bytes of one mailbox."""
        return _padded(_HEADER * 8) + _padded(self.num_experts * 12) + _padded(self.num_experts)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def _padded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // 64) * 64


class Mailbox:
    """Views of one worker's mailbox; each side uses one of its own, from one thread.

    Args:
        buffer: The mapped region.
        shape: Sizes.
    """

    def __init__(self, buffer: Any, shape: ChannelShape) -> None:
        view = memoryview(buffer)
        self._fence = new_fence()
        self._words = view[: _HEADER * 8].cast("q")
        offset = _padded(_HEADER * 8)
        self.segments_n3: NDArray[np.int32] = np.frombuffer(
            view, dtype=np.int32, count=shape.num_experts * 3, offset=offset
        ).reshape(-1, 3)
        offset += _padded(shape.num_experts * 12)
        self.status_n: NDArray[np.uint8] = np.frombuffer(
            view, dtype=np.uint8, count=shape.num_experts, offset=offset
        )

    def post(self, *, layer: int, rows: int, segments_n3: NDArray[np.int32]) -> int:
        """Write a request; returns its sequence number."""
        n = len(segments_n3)
        self.segments_n3[:n] = segments_n3
        self._words[2], self._words[3], self._words[4] = layer, rows, n
        seq = self._words[0] + 1
        # Not before the request, the input rows included, and not before we had read the last
        # answer's rows.
        if self._fence is not None:
            self._fence()
        self._words[0] = seq
        return seq

    def request(self) -> tuple[int, int, int, int]:
        """The latest request: sequence number, layer, rows, segments."""
        words = self._words
        seq = words[0]
        if self._fence is not None:
            self._fence()  # nothing that belongs to it, the rows included, was read before
        return seq, words[2], words[3], words[4]

    def answer(self, seq: int, *, busy_ns: int) -> None:
        """Write the answer to a request; the statuses have been written before."""
        self._words[5] = busy_ns
        # Not before statuses and rows, and not before we had read the request's.
        if self._fence is not None:
            self._fence()
        self._words[1] = seq

    def has_answered(self, seq: int) -> bool:
        """Whether a request has been answered; if so, what belongs to the answer can be read."""
        if self._words[1] < seq:
            return False
        if self._fence is not None:
            self._fence()
        return True

    @property
    def requested(self) -> int:
        """Sequence number of the latest request; ``request`` reads what belongs to it."""
        return self._words[0]

    @property
    def busy_ns(self) -> int:
        """Nanoseconds that the latest answer took to compute."""
        return self._words[5]


def ring(doorbell: int) -> None:
    """Ring an eventfd."""
    os.eventfd_write(doorbell, 1)


def hush(doorbell: int) -> None:
    """Take back whatever rings an eventfd holds (it does not block)."""
    try:
        os.eventfd_read(doorbell)
    except BlockingIOError:
        return


def new_doorbell() -> int:
    """A non-blocking eventfd."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def await_answer(
    mailbox: Mailbox, seq: int, doorbell: int, *, spin_s: float, timeout_s: float
) -> bool:
    """Wait for an answer: look at it for a while, then sleep until the doorbell rings.

    Args:
        mailbox: Where it arrives.
        seq: The request it answers.
        doorbell: Rung by the worker after each answer.
        spin_s: How long to look before sleeping; burns a core, saves a wake-up.
        timeout_s: How long to wait in all.

    Returns:
        Whether the answer has come.
    """
    deadline_s = time.monotonic() + timeout_s
    if spin_s > 0:
        spin_until_s = time.monotonic() + spin_s
        while not mailbox.has_answered(seq):
            if time.monotonic() > spin_until_s:
                break
    poller: select.poll | None = None
    while not mailbox.has_answered(seq):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        if poller is None:
            poller = select.poll()
            poller.register(doorbell, select.POLLIN)
        if poller.poll(max(1, int(left_s * 1000))):
            hush(doorbell)
    return True
