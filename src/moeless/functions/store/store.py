"""Reads the weights of single experts from a checkpoint."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from moeless.core.checkpoint import ExpertLayout, TensorSource
from moeless.core.model import ModelSpec
from moeless.errors import CheckpointError, FunctionError
from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.store.index import CheckpointIndex
from moeless.functions.store.read_memory import ReadMemory
from moeless.functions.store.sources import (
    check_part,
    fill_keys,
    read_pair,
    read_single,
    stored_ranges,
)

_DECODING = 3
"""Memory of decoding or converting, what was read and the result included, as a multiple of the
result (measured for bfloat16: 2.5 for MXFP4)."""


class ExpertStore:
    """Experts of one checkpoint directory, read on demand into private memory.

    Only the bytes of the expert asked for are read, whatever the layout. The store keeps headers
    and file descriptors, no weights; it may be used from several threads, and each process opens
    its own.

    Args:
        directory: Holds the safetensors files.
        layout: Where expert weights are stored.
        spec: The routed experts; its dtype is that of loaded weights.

    Raises:
        CheckpointError: The directory holds no safetensors weights.
    """

    def __init__(self, directory: Path, layout: ExpertLayout, spec: ModelSpec) -> None:
        self._index = CheckpointIndex(directory)
        self._layout = layout
        self._spec = spec
        self._dtype: torch.dtype = getattr(torch, spec.expert.dtype)

    @property
    def spec(self) -> ModelSpec:
        """The routed experts."""
        return self._spec

    @property
    def bytes_of_function(self) -> int:
        """Bytes of one loaded expert; the same for all of them."""
        return self._spec.expert.num_bytes

    @cached_property
    def load_bytes(self) -> int:
        """The most memory that loading one expert takes at a time, the result included.

        Raises:
            CheckpointError: A tensor or its shard is missing or damaged.
        """
        as_read = self.bytes_of_function
        stored, straight = 0, True
        for source, part in self._parts():
            straight &= source.codec == "plain" and not (source.transposed or source.interleaved)
            for key in fill_keys(source, self._spec.layer_ids[0], 0):
                for _, _, num_bytes in stored_ranges(self._index, source, key, part, 0):
                    stored += num_bytes
        return as_read if straight and stored == as_read else _DECODING * as_read

    def validate(self) -> None:
        """Check that all experts of all layers are there, from the shards' headers alone.

        Raises:
            CheckpointError: The first shard or tensor that is missing, damaged or misshapen.
        """
        for source, part in self._parts():
            for layer_id in self._spec.layer_ids:
                for expert in range(1 if source.fused else self._spec.num_experts):
                    for key in fill_keys(source, layer_id, expert):
                        check_part(self._index, source, key, part, self._spec.num_experts)

    def fetch(self, layer: int, expert: int) -> None:
        """Have the system hold one expert's bytes in memory, so that loading it soon is quick.

        Never fails: what is wrong with the files shows on loading.
        """
        with contextlib.suppress(CheckpointError):
            self._index.fetch(self._stored(layer, [expert]))

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Experts of a layer will be loaded soon: have the system begin to read them.

        For small ones: those that lie one behind the other it reads in one piece, where reading
        one at a time would wait for the disk each time. Never fails, nor blocks for long.
        """
        with contextlib.suppress(CheckpointError):
            self._index.expect(self._stored(layer, experts))

    def _stored(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Tensors, each with the first byte and the number of bytes of an expert's part."""
        layer_id = self._spec.layer_ids[layer]
        for source, part in self._parts():
            for expert in experts:
                for key in fill_keys(source, layer_id, expert):
                    yield from stored_ranges(self._index, source, key, part, expert)

    def load(self, layer: int, expert: int, *, memory: ReadMemory | None = None) -> ExpertWeights:
        """Read one expert.

        Args:
            layer: MoE layer, counted from 0.
            expert: Logical expert.
            memory: Where it is read to: the result is valid until that is used again. None for
                memory of its own.

        Returns:
            Its parameters in canonical form.

        Raises:
            CheckpointError: The file is gone, damaged or unreadable; names file and tensor.
            FunctionError: There is no such expert.
        """
        spec, shape = self._spec, self._spec.expert
        if not (0 <= layer < spec.num_layers and 0 <= expert < spec.num_experts):
            raise FunctionError(
                f"{spec.model_id} has no expert {expert} in layer {layer}: it has "
                f"{spec.num_layers} MoE layers of {spec.num_experts} experts"
            )
        if memory is not None:
            memory.begin()
        where: dict[str, Any] = {
            "layer_id": spec.layer_ids[layer],
            "expert": expert,
            "memory": memory,
        }
        layout, index, dtype = self._layout, self._index, self._dtype
        rows, columns = shape.intermediate, shape.hidden
        gate, up = read_pair(index, layout.gate_up, part=(rows, columns), dtype=dtype, **where)
        down = read_single(index, layout.down, part=(columns, rows), dtype=dtype, **where)
        gate_bias = up_bias = down_bias = None
        if layout.gate_up_bias is not None:
            source = layout.gate_up_bias
            gate_bias, up_bias = read_pair(index, source, part=(rows,), dtype=dtype, **where)
        if layout.down_bias is not None:
            source = layout.down_bias
            down_bias = read_single(index, source, part=(columns,), dtype=dtype, **where)
        return ExpertWeights(
            gate=gate,
            up=up,
            down=down,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
        )

    def close(self) -> None:
        """Give file descriptors back; a later load opens files again."""
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _parts(self) -> list[tuple[TensorSource, tuple[int, ...]]]:
        """Each source with the shape of what one of its keys holds for one expert."""
        layout, shape = self._layout, self._spec.expert
        outputs = 2 * shape.intermediate
        rows = outputs // len(layout.gate_up.keys)
        parts: list[tuple[TensorSource, tuple[int, ...]]] = [
            (layout.gate_up, (rows, shape.hidden)),
            (layout.down, (shape.hidden, shape.intermediate)),
        ]
        if layout.gate_up_bias is not None:
            parts.append((layout.gate_up_bias, (outputs // len(layout.gate_up_bias.keys),)))
        if layout.down_bias is not None:
            parts.append((layout.down_bias, (shape.hidden,)))
        return parts
