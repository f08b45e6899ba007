"""Keys and values of all running sequences in one dense, right-aligned buffer per layer.

Every row ends at the same column, so one decode step writes one column for all rows and no
padded row is ever computed::

    columns   0 1 2 3 4 5 6 7 8 9
    row 0     . . a a a a a a . .     length 6        start = 2, end = 8
    row 1     . . . . . b b b . .     length 3
    row 2     . . . . c c c c . .     length 4

The model sees the window [start, end) and a mask of ones over each row's own columns. Distances
between columns equal distances between positions, so sliding-window and chunked masks stay right.
This module must not know requests, sampling or scheduling.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache

from moeless.engines.transformers.generation.cache_layer import BatchCacheLayer, CacheWindow

INITIAL_ROWS = 4
INITIAL_COLUMNS = 256


class BatchCache(Cache):  # type: ignore[misc]  # untyped library
    """The cache of a batch whose rows join and leave at any step.

    Args:
        max_rows: Rows at the most.
        max_length: Tokens that one row may reach.
        rows: Row capacity to start with.
        columns: Column capacity to start with.

    Cost on the token path: one column write per layer; moving or growing is amortised, because
    capacities double and a full buffer always frees at least an eighth of ``max_length``.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        rows: int = INITIAL_ROWS,
        columns: int = INITIAL_COLUMNS,
    ) -> None:
        super().__init__(layers=[])
        self._max_rows = max_rows
        # The slack makes a full buffer leave room to move: a window is max_length wide at most.
        self._max_columns = max_length + max_length // 8 + 64
        self._initial = (min(rows, max_rows), min(columns, self._max_columns))
        self._window = CacheWindow(*self._initial)
        self.lengths: list[int] = []

    @classmethod
    def for_prefill(cls, prompt_tokens: int) -> "BatchCache":
        """A cache of one empty row with room for exactly ``prompt_tokens``."""
        cache = cls(max_rows=1, max_length=prompt_tokens, rows=1, columns=prompt_tokens)
        cache.lengths = [0]
        cache._window.rows = 1
        return cache

    @property
    def width(self) -> int:
        """Columns in the window: the longest row's length."""
        return self._window.end - self._window.start

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows and columns that the buffers hold now."""
        return self._window.row_capacity, self._window.column_capacity

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,  # noqa: ARG002 - signature of the library
        **kwargs: object,  # noqa: ARG002 - signature of the library
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: store new states, return what it may attend to."""
        while len(self.layers) <= layer_idx:
            self.layers.append(BatchCacheLayer(self._window))
        layer: BatchCacheLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - all layers agree
        """Columns before the new tokens."""
        return self.width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Length and offset of what attention sees; the same for all layers."""
        return self.width + query_length, 0

    @property
    def window_lengths(self) -> list[int]:
        """Tokens of each row that a forward sees."""
        window = self._window
        return self.lengths[window.first_row : window.first_row + window.rows]

    def attention_mask(self, new_tokens: int) -> torch.Tensor | None:
        """Ones over each row's columns and its new ones.

        Returns:
            int64 [row, width + new_tokens], or None where nothing is masked.
        """
        lengths, width = self.window_lengths, self.width
        if min(lengths) == width:
            return None
        first_column = torch.tensor([width - length for length in lengths])
        return (torch.arange(width + new_tokens) >= first_column[:, None]).long()

    def position_ids(self, new_tokens: int) -> torch.Tensor:
        """Positions of each row's new tokens, int64 [row, new_tokens]."""
        positions = torch.tensor(self.window_lengths)[:, None]
        return positions if new_tokens == 1 else positions + torch.arange(new_tokens)

    def reserve(self, new_tokens: int) -> None:
        """Make room for ``new_tokens`` more columns."""
        if self._window.end + new_tokens > self._window.column_capacity:
            self._fit(self.width, new_tokens, self._window.row_capacity)

    def commit(self, new_tokens: int) -> None:
        """Count the columns that the last forward wrote as part of every row."""
        self._window.end += new_tokens
        self.lengths = [length + new_tokens for length in self.lengths]

    def append_row(self, source: "BatchCache", columns: slice | None = None) -> int:
        """Copy one sequence of the one-row cache ``source`` in as the last row.

        Args:
            source: A cache filled by prefilling.
            columns: Which of its columns hold the sequence; all if None.

        Returns:
            The new row's index.
        """
        window = self._window
        taken = columns or slice(source._window.start, source._window.end)
        length = taken.stop - taken.start
        row = window.rows
        if row == self._max_rows:
            raise ValueError(f"the batch holds {row} rows at the most")
        rows_needed = row + 1
        row_capacity = window.row_capacity
        if rows_needed > row_capacity:
            row_capacity = min(max(2 * row_capacity, rows_needed), self._max_rows)
        fits = length <= window.end < window.column_capacity
        if not fits or row_capacity != window.row_capacity:
            self._fit(max(self.width, length), 1, row_capacity)
        target = slice(window.end - length, window.end)
        for index, layer in enumerate(source.layers):
            if index == len(self.layers):
                self.layers.append(BatchCacheLayer(window))
            own = self.layers[index]
            if not own.is_initialized:
                own.allocate(layer.keys, layer.values)
            own.keys[row, :, target] = layer.keys[0, :, taken]
            own.values[row, :, target] = layer.values[0, :, taken]
        window.rows = rows_needed
        self.lengths.append(length)
        window.start = window.end - max(self.lengths)
        return row

    def remove_row(self, row: int, *, scrub: bool = False) -> None:
        """Take a row out; the last row moves into its place.

        Args:
            row: Index of the row that leaves.
            scrub: Zero what it wrote. Needed when it may hold NaN: masked columns count zero
                times their value, and zero times NaN is NaN for the row that moves in.
        """
        window = self._window
        last = window.rows - 1
        columns = slice(window.end - self.lengths[last], window.end)
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                if scrub:
                    states[row].zero_()
                if row != last:
                    states[row, :, columns] = states[last, :, columns]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        window.rows = last
        if last:
            window.start = window.end - max(self.lengths)
        else:
            self._clear()

    @contextmanager
    def only_row(self, row: int) -> Iterator[None]:
        """Let forwards see one row alone, without the columns before it."""
        window = self._window
        kept = (window.first_row, window.rows, window.start)
        window.first_row, window.rows = row, 1
        window.start = window.end - self.lengths[row]
        try:
            yield
        finally:
            window.first_row, window.rows, window.start = kept

    def _clear(self) -> None:
        """Start anew; buffers that grew are given back while nothing runs."""
        window = self._window
        window.start = window.end = 0
        if (window.row_capacity, window.column_capacity) != self._initial:
            window.row_capacity, window.column_capacity = self._initial
            self.layers.clear()

    def _fit(self, width: int, new_tokens: int, row_capacity: int) -> None:
        """Place the window so that it ends at column ``width``; grow where that is too tight.

        When memory for larger buffers cannot be had, everything stays as it was.
        """
        window = self._window
        needed = width + new_tokens
        # Room for less than an eighth more tokens would bring the next move too soon.
        comfortable = min(needed + width // 8, self._max_columns)
        columns = window.column_capacity
        if comfortable > columns:
            columns = min(max(2 * columns, comfortable), self._max_columns)
        source = slice(window.start, window.end)
        target = slice(width - (window.end - window.start), width)
        before = self.capacity
        window.row_capacity, window.column_capacity = row_capacity, columns
        try:
            larger = [layer.make_larger() for layer in self.layers]
        except Exception:
            window.row_capacity, window.column_capacity = before
            raise
        for index, layer in enumerate(self.layers):
            layer.relocate(larger[index], window.rows, source, target)
        window.start, window.end = target.start, target.stop
