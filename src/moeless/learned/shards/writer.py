"""Writes gate inputs shard by shard, so that a crash costs at most the shard in the making."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file

from moeless.core.model import DTYPE_BYTES
from moeless.errors import TraceError
from moeless.learned.gate_predictor import Gate
from moeless.learned.shards.files import TEMPORARY_SUFFIX, sha256_of, written_durably
from moeless.learned.shards.gates import fingerprint_gates, read_gates, write_gates
from moeless.learned.shards.manifest import (
    GATES_FILE,
    MANIFEST_FILE,
    ShardEntry,
    ShardManifest,
    read_manifest,
    require_same_recording,
    write_manifest,
)
from moeless.learned.shards.reader import check_digest, read_conversations
from moeless.learned.shards.shard import Shard, check_shard

DEFAULT_SHARD_BYTES = 64 * 2**20
"""Of one shard, which is in memory while it is made."""

_FILE_OVERHEAD_BYTES = 4096
"""Header of a shard and its entry in the manifest; generous."""


class ShardWriter:
    """Appends whole conversations to a directory.

    A conversation that is longer than a shard spans several; the manifest names them once all are
    there, so that after a crash no conversation is there in part.

    Args:
        directory: Made if it is missing; must hold no recording.
        manifest: Of the recording, without shards.
        gates: The model's gates, one per MoE layer.
        max_bytes_per_shard: Bound of a shard, and with it of the memory needed; at least one
            token goes into each.
        max_total_bytes: Bound of the directory; None for no bound.

    Raises:
        TraceError: There is a recording already, or manifest and gates do not fit.
        OSError: The directory cannot be written, here and in all methods.
    """

    def __init__(
        self,
        directory: Path | str,
        manifest: ShardManifest,
        gates: Sequence[Gate],
        *,
        max_bytes_per_shard: int = DEFAULT_SHARD_BYTES,
        max_total_bytes: int | None = None,
    ) -> None:
        self._directory = Path(directory)
        if (self._directory / MANIFEST_FILE).exists():
            raise TraceError(
                f"{directory} holds a recording already; choose another directory, or resume it"
            )
        if len(gates) != manifest.num_layers or fingerprint_gates(gates) != manifest.gates_sha256:
            raise TraceError(f"the manifest for {directory} is not that of these gates")
        self._directory.mkdir(parents=True, exist_ok=True)
        write_gates(self._directory, gates)
        self._manifest = replace(manifest, shards=(), complete=False)
        write_manifest(self._directory, self._manifest)
        self._begin(max_bytes_per_shard, max_total_bytes)

    @classmethod
    def resume(
        cls,
        directory: Path | str,
        *,
        manifest: ShardManifest | None = None,
        max_bytes_per_shard: int = DEFAULT_SHARD_BYTES,
        max_total_bytes: int | None = None,
    ) -> "ShardWriter":
        """Continue after the last whole shard.

        Files that an interrupted writer left behind are removed.

        Args:
            directory: Holds a recording.
            manifest: What the recording is to say of itself from now on; None leaves it as it is.
            max_bytes_per_shard: As for the class.
            max_total_bytes: As for the class; counts what is there.

        Raises:
            TraceError: There is no recording, what is there is damaged, or the manifest is that
                of another recording.
        """
        writer = cls.__new__(cls)
        writer._directory = Path(directory)
        found = read_manifest(writer._directory)
        if manifest is not None:
            require_same_recording(found, manifest)
        read_gates(writer._directory, found)
        writer._manifest = replace(manifest or found, shards=found.shards, complete=False)
        kept = {entry.file for entry in writer._manifest.shards}
        for path in writer._directory.iterdir():
            is_shard = path.name.startswith("shard-") and path.name not in kept
            if path.name.endswith(TEMPORARY_SUFFIX) or is_shard:
                path.unlink()
        writer._begin(max_bytes_per_shard, max_total_bytes)
        for entry in writer._manifest.shards:
            check_digest(writer._directory, entry)
            writer._recorded.update(read_conversations(writer._directory, entry))
            writer._written_bytes += (writer._directory / entry.file).stat().st_size
        writer._listed = frozenset(writer._recorded)
        return writer

    def _begin(self, max_bytes_per_shard: int, max_total_bytes: int | None) -> None:
        manifest = self._manifest
        self._rows_per_shard = max(1, max_bytes_per_shard // self.bytes_per_token)
        self._max_total_bytes = max_total_bytes
        self._recorded: set[int] = set()
        self._listed: frozenset[int] = frozenset()
        self._unlisted: list[ShardEntry] = []
        self._pending: list[Shard] = []
        self._pending_tokens = 0
        self._written_bytes = sum(
            (self._directory / name).stat().st_size for name in (MANIFEST_FILE, GATES_FILE)
        )
        self.tokens = manifest.tokens

    def __enter__(self) -> "ShardWriter":
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is pending, if nothing went wrong."""
        if kind is None:
            self.close()

    @property
    def manifest(self) -> ShardManifest:
        """Of what is on disk."""
        return self._manifest

    @property
    def recorded(self) -> frozenset[int]:
        """Indices of the conversations that are there, pending ones included."""
        return frozenset(self._recorded)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row in a shard, with the layer's input where that is recorded."""
        manifest = self._manifest
        states = 2 if manifest.config.get("layer_inputs") else 1
        per_layer = states * manifest.hidden * DTYPE_BYTES[manifest.dtype] + 2 * manifest.top_k
        return manifest.num_layers * per_layer + 3 * 4 + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the directory once what is pending is written; an upper bound."""
        pending = self._pending_tokens * self.bytes_per_token
        return self._written_bytes + pending + _FILE_OVERHEAD_BYTES

    def room_tokens(self, *, besides_bytes: int = 0) -> int | None:
        """Tokens that still fit, None if there is no bound.

        Args:
            besides_bytes: What others hold on the same disk on the recording's behalf.
        """
        if self._max_total_bytes is None:
            return None
        per_file = self._rows_per_shard * self.bytes_per_token + _FILE_OVERHEAD_BYTES
        left = self._max_total_bytes - self.num_bytes - besides_bytes
        files, rest = divmod(max(0, left), per_file)
        last = max(0, rest - _FILE_OVERHEAD_BYTES) // self.bytes_per_token
        return files * self._rows_per_shard + last

    def add(self, *pieces: Shard) -> None:
        """Append the tokens of whole conversations; see ``add_pieces``."""
        self.add_pieces(pieces)

    def add_pieces(self, pieces: Iterable[Shard]) -> None:
        """Append the tokens of one whole conversation, or of several.

        Args:
            pieces: Its tokens, in the order of their positions; copied. One piece is in memory
                at a time if this is an iterator.

        Raises:
            TraceError: Shapes, dtypes, experts or numbers do not fit the manifest, a conversation
                is there already, or it does not fit within ``max_total_bytes``. When this is found
                after the first piece, what the manifest does not name yet is given up.
        """
        added: set[int] = set()
        try:
            for number, piece in enumerate(pieces):
                added |= self._check(piece)
                self._append(piece, begins=number == 0)
        except BaseException:
            if added:  # a conversation is there whole or not at all
                self._give_up_unlisted()
            raise
        self._recorded |= added

    def close(self, *, complete: bool = False) -> None:
        """Write what is pending.

        Args:
            complete: Whether the recording got to the end it was asked for.
        """
        self._seal()
        self._manifest = replace(self._manifest, complete=complete)
        self._list_shards()

    def discard(self) -> None:
        """Remove a recording that holds nothing, and its directory if nothing else is in it."""
        assert self.tokens == 0
        for name in (MANIFEST_FILE, GATES_FILE):
            (self._directory / name).unlink()
        if not any(self._directory.iterdir()):
            self._directory.rmdir()

    def _check(self, piece: Shard) -> set[int]:
        """Require that a piece fits; returns its conversations."""
        numbers: set[int] = set(piece.conversation.tolist())
        where = f"conversation {', '.join(str(number) for number in sorted(numbers))}"
        check_shard(piece, self._manifest, where)
        wanted = bool(self._manifest.config.get("layer_inputs"))
        if wanted != (piece.layer_input is not None):
            raise TraceError(
                f"{where}: layer inputs are {'missing' if wanted else 'not wanted'}; "
                "config.layer_inputs of the manifest says whether they are recorded"
            )
        if again := numbers & self._recorded:
            raise TraceError(f"conversation {min(again)} is recorded already")
        room = self.room_tokens()
        if room is not None and piece.tokens > room:
            raise TraceError(
                f"{where}: {piece.tokens} tokens do not fit into {self._max_total_bytes} bytes"
            )
        return numbers

    def _append(self, piece: Shard, *, begins: bool) -> None:
        size = self._rows_per_shard
        if begins and self._pending_tokens and self._pending_tokens + piece.tokens > size:
            self._seal()
            self._list_shards()
        first = 0
        while first < piece.tokens:
            if self._pending_tokens == size:
                self._seal()
            stop = min(piece.tokens, first + size - self._pending_tokens)
            self._pending.append(
                Shard(*(None if part is None else part[first:stop].clone() for part in piece))  # type: ignore[arg-type] # only layer_input is None
            )
            self._pending_tokens += stop - first
            first = stop
        self.tokens += piece.tokens

    def _give_up_unlisted(self) -> None:
        for entry in self._unlisted:
            path = self._directory / entry.file
            self._written_bytes -= path.stat().st_size
            path.unlink()
        self._unlisted, self._pending, self._pending_tokens = [], [], 0
        self._recorded = set(self._listed)
        self.tokens = self._manifest.tokens

    def _seal(self) -> None:
        """Write the pending tokens as one shard; the manifest does not name it yet."""
        if not self._pending:
            return
        tensors = {}
        for name in Shard._fields:
            parts = [part for shard in self._pending if (part := getattr(shard, name)) is not None]
            if parts:
                tensors[name] = torch.cat(parts)
        number = len(self._manifest.shards) + len(self._unlisted)
        path = self._directory / f"shard-{number:05d}.safetensors"
        with written_durably(path) as partial:
            save_file(tensors, partial)
        conversation = tensors["conversation"]
        self._unlisted.append(
            ShardEntry(
                file=path.name,
                tokens=self._pending_tokens,
                first_conversation=int(conversation.min()),
                last_conversation=int(conversation.max()),
                sha256=sha256_of(path),
            )
        )
        self._written_bytes += path.stat().st_size
        self._pending, self._pending_tokens = [], 0

    def _list_shards(self) -> None:
        before = (self._directory / MANIFEST_FILE).stat().st_size
        self._manifest = replace(self._manifest, shards=(*self._manifest.shards, *self._unlisted))
        self._unlisted = []
        self._listed = frozenset(self._recorded)
        write_manifest(self._directory, self._manifest)
        self._written_bytes += (self._directory / MANIFEST_FILE).stat().st_size - before
