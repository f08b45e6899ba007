"""Chosen tokens of a recording, read a chunk at a time."""

from collections.abc import Collection, Iterator
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeless.errors import TraceError
from moeless.learned.load_predictor import Reads
from moeless.learned.shards import GateShards, Shard

CHUNK_ROWS = 2048
"""Tokens that are read at once: bounds memory beside what is kept."""


class Chunk:
    """Some tokens of one shard.

    Args:
        shard: The shard.
        rows: Which of its rows, int64.
    """

    def __init__(self, shard: Shard, rows: Tensor) -> None:
        self._shard = shard
        self._rows = rows

    def states(self, layer: int, reads: Reads = "gate_input") -> Tensor:
        """Hidden states of a layer, float32 [T, H]."""
        source = self._shard.gate_input if reads == "gate_input" else self._shard.layer_input
        assert source is not None
        return source[:, layer].index_select(0, self._rows).float()

    def topk_ids(self, layer: int) -> Tensor:
        """Experts that a layer chose, int64 [T, K]."""
        return self._shard.topk_ids[:, layer].index_select(0, self._rows).long()


class TokenRows:
    """The tokens of some conversations.

    Args:
        shards: The recording.
        conversations: Whose tokens.
        reads: What will be read; a recording without layer inputs is refused.

    Raises:
        TraceError: A shard is damaged, or layer inputs were not recorded.
    """

    def __init__(
        self,
        shards: GateShards,
        conversations: Collection[int],
        *,
        reads: Reads = "gate_input",
    ) -> None:
        self._shards = shards
        wanted = np.array(sorted(conversations), dtype=np.int64)
        found, facts = [], []
        for number, shard in enumerate(shards):
            if reads == "layer_input" and shard.layer_input is None:
                raise TraceError(
                    f"{shards.directory} has no layer inputs; record again with --layer-inputs"
                )
            rows = np.flatnonzero(np.isin(shard.conversation.numpy(), wanted))
            found.append(np.stack([np.full(len(rows), number), rows]))
            columns = (shard.conversation, shard.position, shard.decode)
            facts.append(np.stack([column.numpy()[rows].astype(np.int64) for column in columns]))
        # A recording without shards has no tokens, but is no mistake here.
        none: NDArray[np.int64] = np.zeros((3, 0), dtype=np.int64)
        self._found: NDArray[np.int64] = np.concatenate([none[:2], *found], axis=1)
        self._facts: NDArray[np.int64] = np.concatenate([none, *facts], axis=1)

    def sample(self, limit: int, *, seed: int = 0) -> "TokenRows":
        """At most so many tokens, drawn at random over all conversations."""
        if self.tokens <= limit:
            return self
        generator = np.random.default_rng(seed)
        return self._keep(np.sort(generator.choice(self.tokens, size=limit, replace=False)))

    def first(self, limit: int) -> "TokenRows":
        """At most so many tokens, the first ones recorded."""
        return self._keep(np.arange(min(limit, self.tokens)))

    def _keep(self, kept: NDArray[np.int64]) -> "TokenRows":
        rows = copy(self)
        rows._found, rows._facts = self._found[:, kept], self._facts[:, kept]
        return rows

    @property
    def tokens(self) -> int:
        """T."""
        return len(self._found[0])

    @property
    def conversation(self) -> NDArray[np.int64]:
        """Conversation of each token, int64 [T]."""
        values_T: NDArray[np.int64] = self._facts[0]
        return values_T

    @property
    def position(self) -> NDArray[np.int64]:
        """Position in its conversation of each token, int64 [T]."""
        values_T: NDArray[np.int64] = self._facts[1]
        return values_T

    @property
    def decode(self) -> NDArray[np.int64]:
        """1 where the token was decoded, int64 [T]."""
        values_T: NDArray[np.int64] = self._facts[2]
        return values_T

    def __iter__(self) -> Iterator[Chunk]:
        """At most ``CHUNK_ROWS`` tokens at a time, in the order of recording."""
        for number, shard in enumerate(self._shards):
            rows = torch.from_numpy(self._found[1, self._found[0] == number])
            for first in range(0, len(rows), CHUNK_ROWS):
                yield Chunk(shard, rows[first : first + CHUNK_ROWS])
