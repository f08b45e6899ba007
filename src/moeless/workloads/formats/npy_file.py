"""Reads an ``.npy`` file, never an object."""

import struct
import tokenize
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError


def read_npy(path: Path) -> NDArray[np.generic]:
    """Read the array of a file.

    Args:
        path: An ``.npy`` file.

    Raises:
        TraceError: Damaged, larger than memory, or it holds pickled objects.
    """
    try:
        with path.open("rb") as file:
            array: NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, struct.error, tokenize.TokenError) as error:
        if "object" in str(error).lower():
            raise TraceError(
                f"{path.name}: holds pickled objects, which can run code; save plain arrays of "
                f"numbers"
            ) from error
        raise TraceError(f"{path.name}: damaged .npy file: {error}") from error
    except MemoryError as error:
        raise TraceError(f"{path.name}: does not fit into memory; sum up its steps") from error
    return array
