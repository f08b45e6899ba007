"""Which shard of a checkpoint directory holds which tensor.

Reads a single ``model.safetensors``, or ``model.safetensors.index.json`` and its shards; of the
two the first, as transformers does, unless the second names it as one of several shards. Headers
are read when first needed. Nothing is ever unpickled. This module must not know torch, experts or
layouts.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from moeless.errors import CheckpointError
from moeless.functions.store.shard import Shard, TensorEntry, refuse_pointer

_FETCH_BYTES = 1 << 20
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointIndex:
    """The tensors of a checkpoint directory; safe to use from several threads.

    Args:
        directory: Holds the safetensors files.

    Raises:
        CheckpointError: No directory, no safetensors weights in it, or an index file that cannot
            be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; give a model directory")
        is_single = (directory / _SINGLE).is_file()
        names: dict[str, str] = {}
        if (directory / _INDEX).is_file():
            try:
                names = _read_weight_map(directory / _INDEX)
            except CheckpointError:
                if not is_single:
                    raise
        files = set(names.values())
        if is_single and (_SINGLE not in files or len(files) == 1):
            shard = Shard(directory / _SINGLE)
            self._shard_of = dict.fromkeys(shard.entries(), shard)
            self._shards: tuple[Shard, ...] = (shard,)
        elif names:
            shards = {name: Shard(directory / name) for name in sorted(files)}
            self._shard_of = {key: shards[name] for key, name in names.items()}
            self._shards = tuple(shards.values())
        else:
            raise CheckpointError(_describe_lack(directory))

    def keys(self) -> Iterable[str]:
        """All tensor names, whether or not their shards are there."""
        return self._shard_of.keys()

    def __contains__(self, key: str) -> bool:
        return key in self._shard_of

    def holds(self, key: str) -> bool:
        """Whether a tensor is really there: an index may list what no shard has.

        Raises:
            CheckpointError: Its shard is missing or damaged.
        """
        try:
            return key in self and key in self._shard(key).entries()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {key}: {error}") from error

    def entry(self, key: str) -> TensorEntry:
        """What a tensor looks like.

        Raises:
            CheckpointError: The tensor or its shard is missing, or the shard is damaged.
        """
        shard = self._shard(key)
        try:
            entry = shard.entries().get(key)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {key}: {error}") from error
        if entry is None:
            raise CheckpointError(
                f"tensor {key} is missing from shard {shard.path}, where {_INDEX} places it; "
                f"download both again"
            )
        return entry

    def shard_path(self, key: str) -> Path:
        """The file that holds a tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        return self._shard(key).path

    def read_into(self, key: str, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a tensor; see ``Shard.read_into``."""
        self._shard(key).read_into(key, begin, buffer)

    def fetch(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Have the system hold parts of tensors in memory, each file from its front to its back.

        Args:
            parts: Tensor, first byte counted from the tensor's start, number of bytes.

        Raises:
            CheckpointError: A tensor or its shard is missing or damaged.
        """
        scratch = memoryview(bytearray(_FETCH_BYTES))
        for shard, begin, end in self._ranges(parts):
            shard.fetch(begin, end, scratch)

    def expect(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Tell the system that parts of tensors will be read soon; see ``fetch``."""
        for shard, begin, end in self._ranges(parts):
            shard.expect(begin, end)

    def _ranges(self, parts: Iterable[tuple[str, int, int]]) -> Iterator[tuple[Shard, int, int]]:
        """Where parts of tensors are, each file from its front to its back."""
        ranges: dict[Shard, list[tuple[int, int]]] = {}
        for key, begin, num_bytes in parts:
            first = self.entry(key).begin + begin
            ranges.setdefault(self._shard(key), []).append((first, first + num_bytes))
        for shard, found in ranges.items():
            for begin, end in _joined(found):
                yield shard, begin, end

    def close(self) -> None:
        """Give all file descriptors back; the next use opens files again."""
        for shard in self._shards:
            shard.close()

    def _shard(self, key: str) -> Shard:
        shard = self._shard_of.get(key)
        if shard is None:
            raise CheckpointError(
                f"key {key} is missing from {self.directory}; download the checkpoint again"
            )
        return shard


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges in order, those that touch made one."""
    begin = end = -1
    for first, last in sorted(ranges):
        if first > end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(end, last)
    if end > begin:
        yield begin, end


def _read_weight_map(path: Path) -> dict[str, str]:
    refuse_pointer(path)
    try:
        names: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        # A name with a directory in it could lead out of the checkpoint.
        good = all(isinstance(n, str) and Path(n).name == n for n in names.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index; download it again") from error
    if not good:
        raise CheckpointError(f"{path} names a shard that is not a plain file name")
    if not names:
        raise CheckpointError(f"{path} lists no tensors; download it again")
    return names


def _describe_lack(directory: Path) -> str:
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        return (
            f"{directory} holds pickled weights; only safetensors are read: "
            f"convert it with save_pretrained"
        )
    if any(directory.glob("*.gguf")):
        return f"{directory} holds GGUF files; only safetensors are read: download those"
    shards = {path.name for path in directory.glob("*.safetensors")}
    if shards and all(name.startswith("consolidated") for name in shards):
        return (
            f"{directory} holds {min(shards)}, weights under other names than transformers has; "
            f"download the safetensors files that are called model, and their index"
        )
    if shards:
        return f"{directory} has shards but neither {_SINGLE} nor {_INDEX}; download the index"
    return f"{directory} has no weights ({_SINGLE} or {_INDEX}); download the checkpoint"
