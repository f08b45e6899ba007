"""The weights that the engine keeps: everything but the routed experts, read lazily.

Built as a state dict whose values are read (and decoded, where they are block FP8) when
transformers takes them, into memory of their own. Bytes of experts are never touched. To check a
checkpoint nothing is read: values are then hollow, of the right shape and dtype.
"""

import re
from typing import Any

import torch

from moeless.engines.transformers.families.base import Family
from moeless.engines.transformers.quantization import fp8_block_size
from moeless.errors import CheckpointError
from moeless.functions.store.codecs import decode_fp8_block
from moeless.functions.store.index import CheckpointIndex
from moeless.functions.store.tensors import read_tensor

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SCALE = "_scale_inv"


class StoredWeight:
    """One tensor that is read when it is indexed, as transformers does with lazy slices.

    Args:
        weights: What it belongs to.
        key: Its name in the checkpoint.
    """

    def __init__(self, weights: "EngineWeights", key: str) -> None:
        self._weights = weights
        self._key = key

    def __getitem__(self, item: Any) -> torch.Tensor:
        return self._weights.read(self._key)[item]


class EngineWeights:
    """The engine's part of a checkpoint.

    Args:
        index: The checkpoint's tensors.
        family: Tells which names are experts'.
        config: The model's configuration.
        dtype: Into which FP8 weights are decoded.
        hollow: Read nothing: all elements of a value are one in memory.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        family: Family,
        config: Any,
        dtype: torch.dtype,
        *,
        hollow: bool = False,
    ) -> None:
        self._index = index
        self._block = fp8_block_size(config)
        self._dtype = dtype
        self._hollow = hollow
        self._prefix = family.key_prefix(config)
        self._expert_keys = family.expert_keys
        self._num_layers = family.text_config(config).num_hidden_layers
        self.failure: CheckpointError | None = None
        """The first error of a read. transformers reports such errors in words of its own."""

    def state_dict(self) -> dict[str, StoredWeight]:
        """Lazy tensors by the names that the language model has for them.

        Raises:
            CheckpointError: A tensor or its shard is missing or damaged, as far as headers tell,
                or FP8 without scales.
        """
        weights = {}
        for key in self._index.keys():  # noqa: SIM118 - an index is not a mapping
            if self._is_kept(key) and self._index.holds(key):
                self._check(key)
                weights[key.removeprefix(self._prefix)] = StoredWeight(self, key)
        return weights

    def float_dtype(self) -> str | None:
        """Dtype (safetensors name) of the first plain floating-point tensor, if there is one."""
        for key in self._index.keys():  # noqa: SIM118 - an index is not a mapping
            kept = self._is_kept(key) and self._index.holds(key)
            dtype = self._index.entry(key).dtype if kept else ""
            if dtype in {"F32", "BF16", "F16"}:
                return dtype
        return None

    def read(self, key: str) -> torch.Tensor:
        """Read and decode one tensor; remembers the first failure."""
        if self._hollow:
            return torch.empty((), dtype=self._dtype).expand(self._index.entry(key).shape)
        try:
            tensor = read_tensor(self._index, key)
            if self._is_fp8(key) and self._block is not None:
                scales = read_tensor(self._index, key + _SCALE)
                return decode_fp8_block(tensor, scales, self._block, self._dtype)
        except CheckpointError as error:
            self.failure = self.failure or error
            raise
        return tensor

    def _is_kept(self, key: str) -> bool:
        if not key.startswith(self._prefix) or self._expert_keys.search(key):
            return False
        layer = _LAYER.search(key)
        # Layers past the last one predict several tokens ahead; the model here has none.
        return not key.endswith(_SCALE) and (layer is None or int(layer[1]) < self._num_layers)

    def _is_fp8(self, key: str) -> bool:
        return self._index.entry(key).dtype == "F8_E4M3"

    def _check(self, key: str) -> None:
        if self._is_fp8(key) and (self._block is None or key + _SCALE not in self._index):
            raise CheckpointError(
                f"tensor {key} of shard {self._index.shard_path(key)} is FP8 without block "
                f"scales, which cannot be decoded; use the unquantised checkpoint"
            )
