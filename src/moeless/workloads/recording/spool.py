"""Arrays that grow on disk: rows are appended now and read as one array at the end.

Numpy only; must not know what the rows mean.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GATHER_BYTES = 16 * 2**20
"""Rows that are held while they are put in another order."""


class Spool:
    """Rows of one shape and dtype in a nameless file, which vanishes with the process.

    Args:
        row_shape: Shape of a row.
        dtype: Its dtype.
        folder: Where the file lives.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """

    def __init__(
        self, row_shape: tuple[int, ...], dtype: type[np.generic] | np.dtype[Any], folder: Path
    ) -> None:
        self._row_shape = row_shape
        self._dtype = np.dtype(dtype)
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in close
        self._rows = 0

    def __len__(self) -> int:
        """Rows so far."""
        return self._rows

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows [n, *row_shape]; converted to the spool's dtype."""
        assert rows.shape[1:] == self._row_shape
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self._rows += len(rows)

    def read(self) -> NDArray[Any]:
        """All rows as a read-only view of the file; it stays valid after ``close``."""
        shape = (self._rows, *self._row_shape)
        self._file.flush()
        if self._rows == 0:
            return np.empty(shape, dtype=self._dtype)  # nothing to map
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=shape)

    def read_in_order(self, order: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of these indices, in this order, as a read-only view of another file."""
        rows = self.read()
        ordered = Spool(self._row_shape, self._dtype, self._folder)
        try:
            size = max(1, _GATHER_BYTES // max(1, rows[:1].nbytes))
            for first in range(0, len(order), size):
                ordered.append(rows[order[first : first + size]])
            return ordered.read()
        finally:
            ordered.close()

    def close(self) -> None:
        """Give the file up."""
        self._file.close()
