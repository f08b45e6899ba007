"""From an engine's board to the control loop."""

import math
from typing import Protocol

import numpy as np

from moeless.core.plan import LoadArray
from moeless.functions.links.board import EngineBoard


class LoadConsumer(Protocol):
    """What becomes of loads; ``control.Controller`` is one."""

    @property
    def adaptive(self) -> bool:
        """Whether plans follow loads."""
        ...

    def start(self) -> None:
        """Plan every layer before the first step."""
        ...

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """A load came true."""
        ...

    def forecast(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        """A load is expected, and with it the share of its tokens that are misplaced."""
        ...


class LoadIntake:
    """Hands each new load on a board to the control loop, once and the most urgent first.

    A load that was overwritten before it was seen is skipped: the newest is the one that counts.
    So is one that is being written: the engine rings again when it is complete.

    Args:
        board: Where the engine writes loads.
        consumer: The control loop.
    """

    def __init__(self, board: EngineBoard, consumer: LoadConsumer) -> None:
        self._board = board
        self._consumer = consumer
        self._forecast_L = np.zeros_like(board.forecast_step_L)
        self._actual_L = np.zeros_like(board.actual_step_L)

    def take(self) -> None:
        """Look at the board."""
        board = self._board
        for layer in (board.forecast_step_L > self._forecast_L).nonzero()[0].tolist():
            read = board.read_marked(
                board.forecast_step_L, layer, board.forecast_LE, board.forecast_error_L
            )
            if read is None:
                continue
            step, (load_E, error) = read
            self._forecast_L[layer] = step
            self._consumer.forecast(
                step=step,
                layer=layer,
                load_E=load_E,
                expected_error=None if math.isnan(error) else float(error),
            )
        for layer in (board.actual_step_L > self._actual_L).nonzero()[0].tolist():
            read = board.read_marked(board.actual_step_L, layer, board.actual_LE)
            if read is None:
                continue
            step, (load_E,) = read
            self._actual_L[layer] = step
            self._consumer.observe(step=step, layer=layer, load_E=load_E)
