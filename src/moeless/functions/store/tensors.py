"""Tensors read from a checkpoint into memory of their own."""

import math

import torch

from moeless.errors import CheckpointError
from moeless.functions.store.index import CheckpointIndex
from moeless.functions.store.read_memory import ReadMemory

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_range(
    index: CheckpointIndex,
    key: str,
    *,
    first: int,
    shape: tuple[int, ...],
    memory: ReadMemory | None = None,
) -> torch.Tensor:
    """Read consecutive elements of a tensor.

    Args:
        index: The checkpoint.
        key: The tensor.
        first: First element, counted in the tensor's own row-major order.
        shape: Of the result.
        memory: Where it is read to; None for memory of its own.

    Returns:
        A contiguous tensor of the stored dtype.

    Raises:
        CheckpointError: The range is not in the tensor, the dtype is unknown, or reading failed.
    """
    entry = index.entry(key)
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(f"tensor {key} has dtype {entry.dtype}, which cannot be read")
    count = math.prod(shape)
    if first + count > math.prod(entry.shape):
        raise CheckpointError(
            f"tensor {key} of shard {index.shard_path(key)} has shape {list(entry.shape)}, "
            f"which is too small for this model; download the checkpoint again"
        )
    tensor = torch.empty(shape, dtype=dtype) if memory is None else memory.take(shape, dtype)
    if count:
        buffer = tensor.view(-1).view(torch.uint8).numpy().data
        index.read_into(key, first * dtype.itemsize, buffer)
    return tensor


def read_tensor(index: CheckpointIndex, key: str) -> torch.Tensor:
    """Read a whole tensor; see ``read_range``."""
    return read_range(index, key, first=0, shape=index.entry(key).shape)
