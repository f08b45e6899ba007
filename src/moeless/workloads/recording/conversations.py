"""Everything about the tokens of whole conversations, kept on disk until each is complete.

Requests that run together have their tokens computed together; here each gets its own rows, in
the order of its positions. Numpy only: hidden states are words of so many bits, and what they
mean is the business of whoever takes the conversations.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moeless.workloads.recording.ledgers import RecordedStep, RoutedShape
from moeless.workloads.recording.spool import Spool

_PIECE_BYTES = 16 * 2**20
"""Rows of a conversation that are in memory at the same time when it is handed on."""


class ConversationTaker(Protocol):
    """Gets complete conversations."""

    def room_tokens(self, *, besides_bytes: int) -> int | None:
        """Tokens that still fit beside so many bytes of unfinished ones; None: no bound."""
        ...

    def take(self, number: int, pieces: Iterator[NDArray[Any]]) -> None:
        """Take a conversation: rows with the fields of ``row_dtype``, in pieces."""
        ...


def row_dtype(shape: RoutedShape, hidden: int, states: Mapping[str, str]) -> np.dtype[Any]:
    """A token's row: ``topk_ids`` [L, K], ``position``, ``decode``, ``token_ids``, states [L, H].

    Args:
        shape: L and K.
        hidden: H.
        states: Numpy's name of the words of each hidden state, for example ``int16``.
    """
    fields: list[Any] = [("position", np.int32), ("token_ids", np.int32), ("decode", np.uint8)]
    fields += [(name, words, (shape.num_layers, hidden)) for name, words in states.items()]
    fields.append(("topk_ids", np.int16, (shape.num_layers, shape.top_k)))
    return np.dtype(fields)


class ConversationLedger:
    """Hands a conversation on when it is complete; what is not complete leaves nothing.

    It is full when a bound is reached. Then conversations that are not complete can still be
    handed on as far as they are: their first tokens are as good as those of whole ones.

    Args:
        dtype: Of a token's row, from ``row_dtype``.
        folder: Where temporary files live.
        number_of: The number of a request's conversation.
        taker: Gets conversations.
        max_tokens: Tokens to record at the most; None for no bound.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        *,
        folder: Path,
        number_of: Callable[[str], int],
        taker: ConversationTaker,
        max_tokens: int | None,
    ) -> None:
        self._dtype = dtype
        self._folder = folder
        self._number_of = number_of
        self._taker = taker
        self._open: dict[str, Spool] = {}
        self._left = max_tokens
        self.tokens = 0
        self.is_full = max_tokens == 0
        self.ran_out_of_disk = False

    def add(self, step: RecordedStep) -> None:
        """Take a step: each part goes to its conversation."""
        first = 0
        for request_id, phase, tokens, start, token_ids in step.parts:
            kept = self._admit(tokens)
            if kept:
                rows = np.empty(kept, dtype=self._dtype)
                rows["position"] = np.arange(start, start + kept)
                rows["token_ids"] = token_ids[:kept]
                rows["decode"] = phase == "decode"
                rows["topk_ids"] = step.ids_TLK[first : first + kept]
                for name, state_TLH in step.states_TLH.items():
                    rows[name] = state_TLH[first : first + kept]
                spool = self._open.get(request_id)
                if spool is None:
                    spool = self._open[request_id] = Spool((), self._dtype, self._folder)
                spool.append(rows)
                self.tokens += kept
            first += tokens

    def finish(self, request_id: str) -> None:
        """A request is complete; one that never had a token computed leaves nothing."""
        spool = self._open.pop(request_id, None)
        if spool is None:
            return
        try:
            self._taker.take(self._number_of(request_id), self._read_pieces(spool))
        finally:
            spool.close()

    def finish_open(self) -> None:
        """Hand on what there is of conversations that are not complete."""
        for request_id in list(self._open):
            self.finish(request_id)

    def close(self) -> None:
        """Give temporary files up."""
        for spool in self._open.values():
            spool.close()
        self._open.clear()

    def _admit(self, tokens: int) -> int:
        """How many of a conversation's next tokens can be kept."""
        if self.is_full:
            return 0
        kept = tokens if self._left is None else min(tokens, self._left)
        held = [len(spool) for spool in self._open.values()]
        # The longest may for a moment be there twice: while it is handed on.
        besides = (sum(held) + max(held, default=0)) * self._dtype.itemsize
        room = self._taker.room_tokens(besides_bytes=besides)
        if room is not None and room // 2 < kept:  # the new rows may become the longest
            kept, self.ran_out_of_disk = room // 2, True
        if self._left is not None:
            self._left -= kept
        self.is_full = self._left == 0 or self.ran_out_of_disk
        return kept

    def _read_pieces(self, spool: Spool) -> Iterator[NDArray[Any]]:
        rows = spool.read()
        size = max(1, _PIECE_BYTES // self._dtype.itemsize)
        for first in range(0, len(rows), size):
            yield rows[first : first + size]
