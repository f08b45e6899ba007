"""Reads the small integer tensors of a safetensors file with numpy alone.

The format: a little-endian uint64 header length, a JSON header that maps names to dtype, shape
and byte offsets, then the bytes.

Source: huggingface/safetensors, ``README.md``, section Format.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError

_DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "F32": "<f4", "F64": "<f8"}


def read_safetensors(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all tensors of a file.

    Args:
        path: The file.

    Returns:
        Arrays by name.

    Raises:
        TraceError: Truncated, not safetensors, or a dtype that counts do not have.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise TraceError(f"{path.name}: not a safetensors file, or cut short")
    try:
        header = json.loads(data[8 : 8 + length])
        items = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return {name: _array(data[8 + length :], entry) for name, entry in items}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path.name}: damaged safetensors file: {error}") from error


def _array(body: bytes, entry: dict[str, Any]) -> NDArray[np.generic]:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {entry['dtype']} is not a count")
    start, end = entry["data_offsets"]
    shape = tuple(int(extent) for extent in entry["shape"])
    array: NDArray[np.generic] = np.frombuffer(body[start:end], dtype=dtype).reshape(shape)
    return array
