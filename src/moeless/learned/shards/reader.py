"""Reads recorded gate inputs, one shard at a time."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from moeless.errors import TraceError
from moeless.learned.gate_predictor import Gate
from moeless.learned.shards.files import sha256_of
from moeless.learned.shards.gates import read_gates
from moeless.learned.shards.manifest import ShardEntry, ShardManifest, read_manifest
from moeless.learned.shards.shard import Shard, check_shard

_NEEDED = tuple(name for name in Shard._fields if name != "layer_input")


class GateShards:
    """A directory of recorded gate inputs.

    Iterating gives one shard after another, as often as wanted; tensors are views of the mapped
    file, so that memory holds what is looked at. A shard is checked the first time it is read.

    Args:
        directory: What ``moeless record --gate-inputs`` wrote.

    Raises:
        TraceError: Something is missing, damaged or does not fit, when it is first looked at.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.manifest: ShardManifest = read_manifest(self.directory)
        self.gates: list[Gate] = read_gates(self.directory, self.manifest)
        self._checked: set[str] = set()

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.manifest.shards)

    def __iter__(self) -> Iterator[Shard]:
        """One shard after another, in the order of recording."""
        for entry in self.manifest.shards:
            yield self._read(entry)

    @cached_property
    def conversations(self) -> tuple[int, ...]:
        """Indices of all conversations, ascending."""
        found: set[int] = set()
        for entry in self.manifest.shards:
            found.update(read_conversations(self.directory, entry))
        return tuple(sorted(found))

    def split(self, held_out: float = 0.2, seed: int = 0) -> tuple[frozenset[int], frozenset[int]]:
        """Divide the conversations at random, so that none is on both sides.

        Args:
            held_out: Share that is kept away from fitting, above 0 and below 1.
            seed: Of the choice.

        Returns:
            Conversations to fit, and conversations to measure on; at least one each.

        Raises:
            ValueError: ``held_out`` is no such share.
            TraceError: There are fewer than two conversations.
        """
        if not 0.0 < held_out < 1.0:
            raise ValueError(f"held_out is {held_out}; it must be above 0 and below 1")
        count = len(self.conversations)
        if count < 2:
            raise TraceError(
                f"{self.directory} holds {count} conversations; dividing them needs at least 2, "
                "record more"
            )
        order = np.random.default_rng(seed).permutation(count)
        kept = min(count - 1, max(1, round(count * held_out)))
        held = frozenset(self.conversations[i] for i in order[:kept])
        return frozenset(self.conversations) - held, held

    def _read(self, entry: ShardEntry) -> Shard:
        path = self.directory / entry.file
        fresh = entry.file not in self._checked
        if fresh:
            check_digest(self.directory, entry)
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                for name in _NEEDED:
                    if name not in names:
                        raise TraceError(f"{path} has no tensor {name}; record again")
                shard = Shard(
                    **{name: file.get_tensor(name) for name in Shard._fields if name in names}
                )
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error
        if fresh:
            check_shard(shard, self.manifest, str(path))
            if shard.tokens != entry.tokens:
                raise TraceError(
                    f"{path} holds {shard.tokens} tokens, but the manifest says {entry.tokens}"
                )
            self._checked.add(entry.file)
        return shard


def read_conversations(directory: Path, entry: ShardEntry) -> frozenset[int]:
    """Indices of the conversations in a shard.

    Raises:
        TraceError: It is missing or damaged.
    """
    path = directory / entry.file
    try:
        with safe_open(path, framework="pt") as file:
            return frozenset(file.get_tensor("conversation").tolist())
    except FileNotFoundError as error:
        raise TraceError(f"shard {path} is missing; record again") from error
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def check_digest(directory: Path, entry: ShardEntry) -> None:
    """Require that a shard is there and unchanged.

    Raises:
        TraceError: It is not.
    """
    path = directory / entry.file
    try:
        digest = sha256_of(path)
    except FileNotFoundError as error:
        raise TraceError(f"shard {path} is missing; record again") from error
    except OSError as error:
        raise _damaged(path, error) from error
    if digest == entry.sha256:
        return
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error
    raise TraceError(f"shard {path} was changed since it was written (sha256 differs)")


def _damaged(path: Path, error: Exception) -> TraceError:
    return TraceError(f"shard {path} is truncated or damaged ({error}); record again")
