"""One layer's keys and values for all rows of a batch; ``batch_cache`` says which and where."""

import torch
from transformers.cache_utils import CacheLayerMixin


class CacheWindow:
    """Which rows and columns of the buffers a forward sees; shared by all layers."""

    __slots__ = ("column_capacity", "end", "first_row", "row_capacity", "rows", "start")

    def __init__(self, row_capacity: int, column_capacity: int) -> None:
        self.row_capacity = row_capacity
        self.column_capacity = column_capacity
        self.first_row = 0
        self.rows = 0
        self.start = 0
        self.end = 0


class BatchCacheLayer(CacheLayerMixin):  # type: ignore[misc]  # untyped library
    """One layer's buffers: keys and values [row, head, column, dim], dims free to differ."""

    def __init__(self, window: CacheWindow) -> None:
        super().__init__()
        self._window = window

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make zeroed buffers of the window's capacities, shaped like [row, head, column, dim]."""
        self.keys, self.values = (self._zeros_like(states) for states in (keys, values))
        self.is_initialized = True

    def _zeros_like(self, states: torch.Tensor) -> torch.Tensor:
        window = self._window
        shape = (window.row_capacity, states.shape[1], window.column_capacity, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate on the first use, when shapes, type and device are known."""
        self.allocate(key_states, value_states)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,  # noqa: ARG002 - signature of the library
        **kwargs: object,  # noqa: ARG002 - signature of the library
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new columns after the window; return views of the window and them.

        Nothing is committed: a forward that fails half-way leaves the window as it was.
        """
        if not self.is_initialized:
            self.allocate(key_states, value_states)
        window = self._window
        rows = slice(window.first_row, window.first_row + window.rows)
        end = window.end + key_states.shape[2]
        self.keys[rows, :, window.end : end] = key_states
        self.values[rows, :, window.end : end] = value_states
        seen = slice(window.start, end)
        return self.keys[rows, :, seen], self.values[rows, :, seen]

    def make_larger(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Zeroed buffers of the window's capacities; None if those here have them already."""
        if not self.is_initialized:
            return None
        window = self._window
        if (self.keys.shape[0], self.keys.shape[2]) == (
            window.row_capacity,
            window.column_capacity,
        ):
            return None
        return self._zeros_like(self.keys), self._zeros_like(self.values)

    def relocate(
        self,
        larger: tuple[torch.Tensor, torch.Tensor] | None,
        rows: int,
        source: slice,
        target: slice,
    ) -> None:
        """Move ``rows`` rows of columns ``source`` to ``target``, into larger buffers if given."""
        if not self.is_initialized:
            return
        if larger is None:
            for states in (self.keys, self.values):
                # Source and target may overlap, so the way is over a copy.
                states[:rows, :, target] = states[:rows, :, source].clone()
            return
        for new, old in zip(larger, (self.keys, self.values), strict=True):
            new[:rows, :, target] = old[:rows, :, source]
        self.keys, self.values = larger

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in the window."""
        return self._window.end - self._window.start

    def get_max_length(self) -> int:
        """No limit of its own: the buffers grow."""
        return -1
