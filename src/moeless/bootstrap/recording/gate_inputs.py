"""Wires the recording of gate inputs: hidden states of the engine become shards of tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import ModelSpec
from moeless.errors import ConfigError, TraceError, os_reason
from moeless.functions.token_path.dispatch import ExpertDispatcher
from moeless.learned.gate_predictor import Gate
from moeless.learned.shards import (
    MANIFEST_FILE,
    Shard,
    ShardManifest,
    ShardWriter,
    fingerprint_gates,
)
from moeless.workloads.recording.conversations import ConversationLedger, row_dtype
from moeless.workloads.recording.ledgers import RoutedShape
from moeless.workloads.recording.recorder import RoutingRecorder

_WORDS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}
"""Numpy knows no bfloat16; a hidden state passes through it as words of as many bits."""

ObserveLayerInputs = Callable[[Callable[[int, torch.Tensor], None]], Any]
"""Makes a context in which an observer is told (MoE layer, its decoder layer's input)."""


@dataclass(frozen=True, kw_only=True)
class GateInputReport:
    """How far a recording of gate inputs is.

    Args:
        tokens: Tokens recorded, those of a recording that was continued included.
        conversations: Conversations that they belong to; complete ones until the end.
        num_bytes: Bytes of the directory.
        ran_out_of_disk: Whether the bound of the directory ended the recording.
    """

    tokens: int
    conversations: int
    num_bytes: int
    ran_out_of_disk: bool


class GateInputRecording:
    """A directory in the making, and the ledger through which tokens come into it.

    Args:
        directory: Where it goes.
        manifest: What it is.
        gates: The model's gates.
        resume: Whether to continue what is there.
        max_tokens: Tokens that the directory may hold; None for no bound.
        max_bytes: Bytes that it may take, unfinished conversations included; None for no bound.
        number_of: The number of a request's conversation.

    Raises:
        ConfigError: The bounds leave no room for a single token.
        TraceError: The directory cannot be continued, or not be written.
    """

    def __init__(
        self,
        directory: Path,
        manifest: ShardManifest,
        gates: list[Gate],
        *,
        resume: bool,
        max_tokens: int | None,
        max_bytes: int | None,
        number_of: Callable[[str], int],
    ) -> None:
        self._manifest = manifest
        try:
            if resume and (directory / MANIFEST_FILE).exists():
                self.writer = ShardWriter.resume(
                    directory, manifest=manifest, max_total_bytes=max_bytes
                )
            else:
                self.writer = ShardWriter(directory, manifest, gates, max_total_bytes=max_bytes)
        except OSError as error:
            raise _unwritable(directory, error) from error
        room = self.writer.room_tokens()
        if room is not None and room < 2:
            needed = self.writer.num_bytes + 2 * (self.writer.bytes_per_token + 4096)
            raise ConfigError(
                f"--max-disk leaves no room for tokens in {directory}: it takes "
                f"{self.writer.num_bytes:,} bytes without them; give at least {needed:,} bytes"
            )
        self.shape = RoutedShape(
            num_layers=manifest.num_layers, num_experts=manifest.num_experts, top_k=manifest.top_k
        )
        self._directory = directory
        self._words = _WORDS[manifest.dtype]
        self.states = ("gate_input", *(("layer_input",) if self.has_layer_inputs else ()))
        self.already = self.writer.recorded
        self.ledger = ConversationLedger(
            row_dtype(
                self.shape,
                manifest.hidden,
                {name: str(self._words).removeprefix("torch.") for name in self.states},
            ),
            folder=directory,
            number_of=number_of,
            taker=self,
            max_tokens=None if max_tokens is None else max(0, max_tokens - self.writer.tokens),
        )
        self._tokens_before = self.writer.tokens

    @property
    def has_layer_inputs(self) -> bool:
        """Whether the inputs of decoder layers are recorded as well."""
        return bool(self._manifest.config.get("layer_inputs"))

    def is_full(self) -> bool:
        """Whether nothing more is to be recorded."""
        return self.ledger.is_full

    def attach(
        self,
        recorder: RoutingRecorder,
        dispatcher: ExpertDispatcher,
        observe_layer_inputs: ObserveLayerInputs,
    ) -> ExitStack:
        """Have the token path tell a recorder of choices and hidden states.

        Args:
            recorder: Made with ``states`` and with the ledger among its keepers.
            dispatcher: The token path.
            observe_layer_inputs: Of the engine.

        Returns:
            What ends it when it is closed.
        """

        def tell(layer: int, name: str, state_TH: torch.Tensor) -> None:
            if not recorder.in_step:
                return
            if not bool(state_TH.isfinite().all()):
                recorder.fail(
                    TraceError(
                        f"{name.replace('_', ' ')} of MoE layer {layer} is not finite: the model "
                        f"computes infinities or NaN in {self._manifest.dtype}; try another "
                        "--dtype"
                    )
                )
            recorder.observe_state(layer, name, self._to_words(state_TH))

        def observe(layer: int, ids_TK: NDArray[np.int64], x_TH: torch.Tensor) -> None:
            recorder.observe(layer, ids_TK)
            tell(layer, "gate_input", x_TH)

        attached = ExitStack()
        dispatcher.observe_choices(observe)
        attached.callback(dispatcher.observe_choices, None)
        if self.has_layer_inputs:
            attached.enter_context(
                observe_layer_inputs(lambda layer, x_TH: tell(layer, "layer_input", x_TH))
            )
        return attached

    def room_tokens(self, *, besides_bytes: int) -> int | None:
        """Tokens that still fit; see ``ConversationTaker``."""
        return self.writer.room_tokens(besides_bytes=besides_bytes)

    def take(self, number: int, pieces: Iterator[NDArray[Any]]) -> None:
        """Put a conversation into the shards; see ``ConversationTaker``."""
        self.writer.add_pieces(self._to_shard(number, rows) for rows in self._fitting(pieces))

    def report(self) -> GateInputReport:
        """How far it is."""
        return GateInputReport(
            tokens=self._tokens_before + self.ledger.tokens,
            conversations=len(self.writer.recorded),
            num_bytes=self.writer.num_bytes,
            ran_out_of_disk=self.ledger.ran_out_of_disk,
        )

    def close(self, *, complete: bool) -> GateInputReport:
        """Write what there is; the recorder has stopped.

        Args:
            complete: Whether all prompts were answered, or enough is recorded.

        Raises:
            TraceError: The directory cannot be written.
        """
        try:
            if self.is_full():
                self.ledger.finish_open()
            self.ledger.close()
            self.writer.close(complete=complete and not self.ledger.ran_out_of_disk)
            num_bytes = sum(path.stat().st_size for path in self._directory.iterdir())
            if self.writer.tokens == 0:  # as if it had not been tried
                self.writer.discard()
        except OSError as error:
            raise _unwritable(self._directory, error) from error
        return GateInputReport(
            tokens=self.writer.tokens,
            conversations=len(self.writer.recorded),
            num_bytes=num_bytes,
            ran_out_of_disk=self.ledger.ran_out_of_disk,
        )

    def _fitting(self, pieces: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        """Pieces as far as the directory has room; each is written before the next is asked for.

        They fit but for the headers of files that nobody could foresee.
        """
        for rows in pieces:
            room = self.writer.room_tokens()
            if room == 0:
                return
            yield rows[:room]

    def _to_words(self, state_TH: torch.Tensor) -> NDArray[Any]:
        own = state_TH.detach().to("cpu", copy=True)
        words: NDArray[Any] = own.contiguous().view(self._words).numpy()
        return words

    def _to_shard(self, number: int, rows: NDArray[Any]) -> Shard:
        floats = getattr(torch, self._manifest.dtype)
        # Copies: the rows are views of a file that is read-only and about to vanish.
        parts = {name: torch.from_numpy(np.array(rows[name])) for name in rows.dtype.names or ()}
        parts |= {name: parts[name].view(floats) for name in self.states}
        return Shard(conversation=torch.full((len(rows),), number, dtype=torch.int32), **parts)


def make_manifest(
    spec: ModelSpec,
    gates: list[Gate],
    *,
    prompts: Mapping[str, Any],
    config: Mapping[str, Any],
) -> ShardManifest:
    """What a recording of a model says about itself.

    Args:
        spec: The model.
        gates: Its gates.
        prompts: Where the conversations come from: source, limit, seed.
        config: The resolved options.
    """
    return ShardManifest(
        model=spec.model_id,
        family=spec.family,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        hidden=spec.expert.hidden,
        layer_ids=spec.layer_ids,
        dtype=spec.expert.dtype,
        gates_sha256=fingerprint_gates(gates),
        router_rule=gates[0].rule,
        prompts=prompts,
        config=config,
    )


def _unwritable(directory: Path, error: OSError) -> TraceError:
    return TraceError(
        f"{directory} cannot be written ({os_reason(error)}); make room, or choose another "
        "directory"
    )
