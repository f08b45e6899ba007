"""Forwards through the model: prompt chunks, and one token for every row.

This module must not know requests, sampling or text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from moeless.engines.transformers.decode_steps import DecodeSteps
from moeless.engines.transformers.generation.batch_cache import BatchCache
from moeless.engines.transformers.generation.observer import Phase, StepMarker
from moeless.engines.transformers.generation.packed_prompts import packed_masks, packed_positions
from moeless.functions.compute.team import set_team_size

_ALONE_TOKENS = 64
"""Tokens of a step up to which torch computes with one thread. Products have helpers of their own
(``functions.compute.team``), and torch's would take their cores from them."""


def _no_marker(phase: Phase, tokens: int) -> nullcontext[None]:  # noqa: ARG001 - a StepMarker
    return nullcontext()


class ModelRunner:
    """Runs one model over caches whose rows may differ in length.

    Args:
        model: A loaded transformers causal language model.
        on_step: Makes a context around each forward.
        batch_invariant: What a decode step makes of a row depends on nothing but the row.

    Raises:
        ConfigError: This model cannot be run in a batch-invariant way.
    """

    def __init__(
        self, model: Any, on_step: StepMarker | None = None, *, batch_invariant: bool = False
    ) -> None:
        self._model = model
        self._on_step = on_step or _no_marker
        self._config = model.config.get_text_config()
        self._device = model.device
        self._dtype = model.dtype
        self._decode_steps = DecodeSteps(model)
        if batch_invariant:
            self._decode_steps.make_invariant(model)
        self._threads = torch.get_num_threads()

    @property
    def model(self) -> Any:
        """The model that it runs."""
        return self._model

    def prefill(self, cache: BatchCache, token_ids: Sequence[int]) -> torch.Tensor:
        """Run further prompt tokens of a one-row cache.

        Returns:
            Logits after the last of them, float [1, vocabulary].
        """
        tokens = torch.tensor([token_ids], device=self._device)
        logits = self._forward("prefill", cache, tokens)
        cache.commit(len(token_ids))
        return logits

    def prefill_packed(self, cache: BatchCache, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run several whole prompts side by side in an empty one-row cache.

        Returns:
            Logits after the last token of each, float [prompt, vocabulary].
        """
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([[token for prompt in prompts for token in prompt]])
        masks = packed_masks(self._config, lengths, self._dtype)
        if isinstance(masks, dict):
            masks = {name: mask.to(self._device) for name, mask in masks.items()}
        else:
            masks = masks.to(self._device)
        last = torch.tensor(lengths).cumsum(dim=0) - 1
        with self._step("prefill", tokens.numel()):
            output = self._model(
                input_ids=tokens.to(self._device),
                attention_mask=masks,
                position_ids=packed_positions(lengths).to(self._device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last.to(self._device),
            )
        cache.commit(tokens.numel())
        logits: torch.Tensor = output.logits[0]
        return logits

    def decode(self, cache: BatchCache, token_ids: Sequence[int]) -> torch.Tensor:
        """Run one token of every row; a column must be reserved.

        Nothing is committed when it raises.

        Returns:
            Logits, float [row, vocabulary].
        """
        tokens = torch.tensor(token_ids, device=self._device)[:, None]
        logits = self._forward("decode", cache, tokens)
        cache.commit(1)
        return logits

    def decode_alone(
        self, cache: BatchCache, token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Run one token of every row, each in a forward of its own; a column must be reserved.

        Returns:
            Logits, float [row, vocabulary], NaN for rows that failed; and why they failed.
        """
        results: list[torch.Tensor | None] = []
        failures: dict[int, Exception] = {}
        for row, token_id in enumerate(token_ids):
            tokens = torch.tensor([[token_id]], device=self._device)
            try:
                with cache.only_row(row):
                    results.append(self._forward("decode", cache, tokens)[0])
            except Exception as error:  # noqa: BLE001 - whatever it was, only this row fails
                results.append(None)
                failures[row] = error
        cache.commit(1)
        found = next((logits for logits in results if logits is not None), torch.zeros(1))
        failed = torch.full_like(found, float("nan"))
        return torch.stack([failed if row is None else row for row in results]), failures

    def _forward(self, phase: Phase, cache: BatchCache, tokens: torch.Tensor) -> torch.Tensor:
        new_tokens = tokens.shape[1]
        decodes = phase == "decode" and new_tokens == 1
        attending = (
            self._decode_steps.attending(cache.window_lengths) if decodes else nullcontext()
        )
        with attending as needs_no_mask, self._step(phase, tokens.numel()):
            mask = None if needs_no_mask else cache.attention_mask(new_tokens)
            output = self._model(
                input_ids=tokens,
                attention_mask=None if mask is None else mask.to(self._device),
                position_ids=cache.position_ids(new_tokens).to(self._device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    @contextmanager
    def _step(self, phase: Phase, tokens: int) -> Iterator[None]:
        set_team_size(self._threads)
        threads = 1 if tokens <= _ALONE_TOKENS and self._decode_steps.is_used else self._threads
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        with self._on_step(phase, tokens):
            yield
