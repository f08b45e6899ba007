"""How a ``TensorSource`` maps to stored tensors, and how one expert's part of them is read.

Vocabulary: a *part* is one stored matrix (or bias vector) of one expert; it has as many rows as
outputs and as many columns as inputs, unless the source says that it is transposed.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from moeless.core.checkpoint import ExpertLayout, TensorSource
from moeless.core.model import ModelSpec
from moeless.errors import CheckpointError
from moeless.functions.store.codecs import MXFP4_GROUP, decode_fp8_block, decode_mxfp4
from moeless.functions.store.index import CheckpointIndex
from moeless.functions.store.read_memory import ReadMemory
from moeless.functions.store.shard import ITEM_BYTES
from moeless.functions.store.tensors import read_range

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_SCALES = _FLOATS | {"F8_E8M0"}


class StoredTensor(NamedTuple):
    """A tensor that a source needs: its shape per expert, and the dtypes it may have."""

    key: str
    shape: tuple[int, ...]
    dtypes: frozenset[str]


def stored_tensors(source: TensorSource, key: str, part: tuple[int, ...]) -> list[StoredTensor]:
    """The tensors behind one key of a source.

    Args:
        source: The source.
        key: One of its keys, filled in.
        part: Shape of one expert's part, [out, in] or [out].
    """
    stored = part[::-1] if source.transposed else part
    if source.codec == "mxfp4":
        rows, columns = part
        groups = columns // MXFP4_GROUP
        packed = frozenset({"U8"})
        return [
            StoredTensor(f"{key}_blocks", (rows, groups, MXFP4_GROUP // 2), packed),
            StoredTensor(f"{key}_scales", (rows, groups), packed),
        ]
    if source.codec == "fp8_block":
        grid = tuple(math.ceil(n / b) for n, b in zip(stored, source.block, strict=True))
        return [
            StoredTensor(key, stored, frozenset({"F8_E4M3"})),
            StoredTensor(f"{key}_scale_inv", grid, _SCALES),
        ]
    return [StoredTensor(key, stored, _FLOATS)]


def fill_keys(source: TensorSource, layer_id: int, expert: int) -> Iterator[str]:
    """The source's keys for one expert of one (absolute) layer."""
    for key in source.keys:
        yield key.format(layer=layer_id, expert=expert)


def stored_ranges(
    index: CheckpointIndex, source: TensorSource, key: str, part: tuple[int, ...], expert: int
) -> Iterator[tuple[str, int, int]]:
    """The bytes behind one key of a source for one expert.

    Args:
        index: The checkpoint.
        source: The source.
        key: One of its keys, filled in.
        part: Shape of one expert's part.
        expert: Logical expert.

    Returns:
        Tensors, each with its first byte and the number of bytes.

    Raises:
        CheckpointError: A tensor or its shard is missing or damaged.
    """
    for stored in stored_tensors(source, key, part):
        num_bytes = math.prod(stored.shape) * ITEM_BYTES.get(index.entry(stored.key).dtype, 0)
        yield stored.key, expert * num_bytes if source.fused else 0, num_bytes


def read_pair(
    index: CheckpointIndex,
    source: TensorSource,
    *,
    layer_id: int,
    expert: int,
    part: tuple[int, ...],
    dtype: torch.dtype,
    memory: ReadMemory | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read gate and up, which are stored apart, one after the other, or interleaved.

    Args:
        index: The checkpoint.
        source: Where they are.
        layer_id: Absolute layer index.
        expert: Logical expert.
        part: Shape of each of the two, [I, H] or [I].
        dtype: Of the result.
        memory: Where they are read to; None for memory of their own.

    Returns:
        Gate and up, each of shape ``part``.

    Raises:
        CheckpointError: Something is missing, misshapen or unreadable.
    """
    keys = list(fill_keys(source, layer_id, expert))
    if len(keys) == 2:
        gate, up = (_read_part(index, source, key, expert, part, dtype, memory) for key in keys)
        return _own(gate, dtype, memory), _own(up, dtype, memory)
    outputs = part[0]
    both = (2 * outputs, *part[1:])
    if source.codec == "plain" and not source.transposed and not source.interleaved:
        # Each half is one run of bytes: read it to where it stays, without a copy.
        first = expert * math.prod(both) if source.fused else 0
        _check(index, source, stored_tensors(source, keys[0], both)[0])
        if memory is not None:  # nobody minds that they share memory
            joined = read_range(index, keys[0], first=first, shape=both, memory=memory)
            gate, up = joined[:outputs], joined[outputs:]
            return _own(gate, dtype, memory), _own(up, dtype, memory)
        half = math.prod(part)
        gate = read_range(index, keys[0], first=first, shape=part)
        up = read_range(index, keys[0], first=first + half, shape=part)
        return _own(gate, dtype, memory), _own(up, dtype, memory)
    joined = _read_part(index, source, keys[0], expert, both, dtype, memory)
    if source.interleaved:
        return _own(joined[0::2], dtype, memory), _own(joined[1::2], dtype, memory)
    return _own(joined[:outputs], dtype, memory), _own(joined[outputs:], dtype, memory)


def read_single(
    index: CheckpointIndex,
    source: TensorSource,
    *,
    layer_id: int,
    expert: int,
    part: tuple[int, ...],
    dtype: torch.dtype,
    memory: ReadMemory | None = None,
) -> torch.Tensor:
    """Read a matrix or bias that is stored by itself; see ``read_pair``."""
    (key,) = fill_keys(source, layer_id, expert)
    return _own(_read_part(index, source, key, expert, part, dtype, memory), dtype, memory)


def check_expert_count(index: CheckpointIndex, layout: ExpertLayout, spec: ModelSpec) -> None:
    """Check that as many experts are stored as the configuration says.

    Experts that are missing here and there are left to whoever checks them one by one.

    Args:
        index: The checkpoint.
        layout: Where expert weights are stored.
        spec: What the configuration says.

    Raises:
        CheckpointError: All layers have another number of experts.
    """
    source = layout.gate_up
    counts = set()
    for layer_id in spec.layer_ids:
        key = source.keys[0] + ("_blocks" if source.codec == "mxfp4" else "")
        if source.fused:
            name = key.format(layer=layer_id, expert=0)
            counts.add(index.entry(name).shape[0] if index.holds(name) else 0)
        else:
            stored = itertools.count()
            counts.add(
                next(e for e in stored if key.format(layer=layer_id, expert=e) not in index)
            )
    if len(counts) == 1 and 0 < (count := counts.pop()) != spec.num_experts:
        raise CheckpointError(
            f"config.json of {index.directory} says {spec.num_experts} experts per layer, but the "
            f"weights have {count}: they do not belong together"
        )


def check_part(
    index: CheckpointIndex, source: TensorSource, key: str, part: tuple[int, ...], experts: int
) -> None:
    """Check from headers alone that the tensors behind a key are there and fit.

    Args:
        index: The checkpoint.
        source: The source.
        key: One of its keys, filled in.
        part: Shape of one expert's part.
        experts: E, the first dimension of fused tensors.

    Raises:
        CheckpointError: A tensor is missing, or has another shape or dtype; names it.
    """
    for stored in stored_tensors(source, key, part):
        _check(index, source, stored, experts)


def _check(
    index: CheckpointIndex, source: TensorSource, stored: StoredTensor, experts: int | None = None
) -> None:
    entry = index.entry(stored.key)
    shape = entry.shape[1:] if source.fused else entry.shape
    fits = shape == stored.shape and (
        not source.fused or experts is None or entry.shape[0] == experts
    )
    if fits and entry.dtype in stored.dtypes:
        return
    wanted = [experts or "experts", *stored.shape] if source.fused else list(stored.shape)
    raise CheckpointError(
        f"tensor {stored.key} of shard {index.shard_path(stored.key)} is {entry.dtype} "
        f"{list(entry.shape)}, expected {' or '.join(sorted(stored.dtypes))} "
        f"{wanted}: config.json and the weights do not belong together"
    )


def _read_part(
    index: CheckpointIndex,
    source: TensorSource,
    key: str,
    expert: int,
    part: tuple[int, ...],
    dtype: torch.dtype,
    memory: ReadMemory | None,
) -> torch.Tensor:
    """One expert's part as [out, in], possibly a view; ``dtype`` if it had to be decoded."""
    pieces = []
    for stored in stored_tensors(source, key, part):
        _check(index, source, stored)
        first = expert * math.prod(stored.shape) if source.fused else 0
        pieces.append(
            read_range(index, stored.key, first=first, shape=stored.shape, memory=memory)
        )
    if source.codec == "mxfp4":
        return decode_mxfp4(pieces[0], pieces[1], dtype)
    if source.codec == "fp8_block":
        tensor = decode_fp8_block(pieces[0], pieces[1], source.block, dtype)
    else:
        (tensor,) = pieces
    return tensor.t() if source.transposed and tensor.ndim == 2 else tensor


def _own(tensor: torch.Tensor, dtype: torch.dtype, memory: ReadMemory | None) -> torch.Tensor:
    """The tensor itself where it is contiguous and of the dtype, else such a copy.

    Without a memory it must also be alone in its storage.
    """
    alone = memory is not None or tensor.untyped_storage().nbytes() == tensor.nbytes
    if alone and tensor.is_contiguous() and tensor.dtype == dtype:
        return tensor
    shape = tuple(tensor.shape)
    own = torch.empty(shape, dtype=dtype) if memory is None else memory.take(shape, dtype)
    return own.copy_(tensor)
