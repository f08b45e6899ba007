"""Hands gate inputs of a few live tokens from the token path to whoever learns from them."""

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

_MOST_SAVED_S = 0.001
"""Time that long steps leave over for noting more of later ones."""


class LiveSample:
    """A bounded queue: one thread notes what enters gates, another one takes it.

    Neither waits for the other. While the queue is full, whole steps are left out: a token is of
    use only if all layers saw it.

    Args:
        num_layers: L, the MoE layers.
        capacity_tokens: Tokens that may wait; those of one step more may be held on top.
        least_rows: Tokens taken of a step, if it has as many.
        most_rows: Tokens taken of a step at the most; long ones give a 16th of theirs.
        share: Part of the time of all steps that noting may take. What a step costs beyond it
            is saved by leaving out later ones, whatever models and machines cost.
        clock: Gives the time in seconds.

    Cost on the token path: copies of those rows in each layer, and one of them all at the end.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        capacity_tokens: int = 256,
        least_rows: int = 4,
        most_rows: int = 32,
        share: float = 0.005,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_layers = num_layers
        self._capacity_tokens = capacity_tokens
        self._least_rows, self._most_rows = least_rows, most_rows
        self._share, self._clock = share, clock
        self._began_s: float | None = None
        self._balance_s = 0.0
        self._parts: list[Tensor] = []
        self._rows = slice(0, 0)
        self._step_tokens = 0
        self._steps = 0
        self._noted: deque[Tensor] = deque()
        self._noted_tokens = 0
        self._taken_tokens = 0
        self.left_out_steps = 0
        """Steps of which nothing was noted, because enough was waiting."""
        self.saved_steps = 0
        """Steps of which nothing was noted, to keep to the share of their time."""

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait to be taken."""
        return self._noted_tokens - self._taken_tokens

    def note(self, layer: int, x_TH: Tensor) -> None:
        """See what enters a layer's gate. Layers come in order; a step that is not ended is lost.

        Args:
            layer: MoE layer.
            x_TH: Its gate input [T, H]; not kept.
        """
        called_s = self._clock()
        if layer == 0:
            self._began_s = called_s
            self._begin(len(x_TH))
        elif layer != len(self._parts) or len(x_TH) != self._step_tokens:
            self._settle(layer, called_s, 0.0)
            return
        if self._step_tokens:
            self._parts.append(x_TH[self._rows].clone())
            if len(self._parts) == self._num_layers:
                self._noted.append(torch.stack(self._parts, dim=1))
                self._noted_tokens += len(self._parts[0])
                self._parts = []
        now_s = self._clock()
        self._settle(layer, now_s, now_s - called_s)

    def take(self) -> Tensor | None:
        """All that waits [T, L, H], oldest tokens first; None if nothing does."""
        found = []
        while self._noted:
            found.append(self._noted.popleft())
        if not found:
            return None
        gate_input_TLH = torch.cat(found)
        self._taken_tokens += len(gate_input_TLH)
        return gate_input_TLH

    def _settle(self, layer: int, now_s: float, took_s: float) -> None:
        """Pay for a note; at its end a step gives what it allows. Pauses between steps do not."""
        self._balance_s -= took_s
        if layer == self._num_layers - 1 and self._began_s is not None:
            earned_s = self._share * (now_s - self._began_s)
            self._balance_s = min(self._balance_s + earned_s, _MOST_SAVED_S)
            self._began_s = None

    def _begin(self, tokens: int) -> None:
        self._parts = []
        self._steps += 1
        self._step_tokens = 0
        if self._balance_s < 0.0:
            self.saved_steps += 1
            return
        if self.waiting_tokens >= self._capacity_tokens:
            self.left_out_steps += 1
            return
        self._step_tokens = tokens
        count = min(tokens, self._most_rows, max(self._least_rows, tokens // 16))
        # Another place in each step: rows of a batch are the same requests for many steps.
        every = tokens // count
        first = self._steps % (tokens - every * (count - 1))
        self._rows = slice(first, first + every * (count - 1) + 1, every)
