"""What a reader may have found on a board that somebody else was writing.

Nobody waits at the board, so a reader may find part of what a moment changed. What it can find
of each replica is known: the values from before, after and during what was done in the time in
which it looked. In most looks nothing was done, and there is one possibility.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import ReplicaArray
from moeless.functions.links.board import ModelBoard

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    moment: int
    warm_LED: ReplicaArray
    planned_LED: ReplicaArray


class BoardHistory:
    """A board and the states of it that a reader may still find.

    Args:
        board: The board.
    """

    def __init__(self, board: ModelBoard) -> None:
        self._board = board
        self._states: deque[_State] = deque()

    def note(self, moment: int, warm: tuple[int, int, int] | None = None) -> None:
        """A moment is about to change the board.

        Args:
            moment: Its number.
            warm: (layer, expert, device) of a replica that becomes warm in it, if only for a
                while.
        """
        warm_LED = self._board.warm_LED.copy()
        planned_LED = self._board.planned_LED.copy()
        self._states.append(_State(moment=moment, warm_LED=warm_LED, planned_LED=planned_LED))
        if warm is not None:
            warm_LED = warm_LED.copy()
            warm_LED[warm] = 1
            self._states.append(_State(moment=moment, warm_LED=warm_LED, planned_LED=planned_LED))

    def forget_before(self, moment: int) -> None:
        """All that was done in earlier moments is visible."""
        while self._states and self._states[0].moment < moment:
            self._states.popleft()

    def may_be_usable(self, layer: int, found_ED: BoolArray) -> BoolArray:
        """Where a reader may have found a planned replica warm, or may have not, as it says."""
        warm_ED, cold_ED = self._range(self._warm(layer))
        planned_ED, unplanned_ED = self._range(self._planned(layer))
        may: BoolArray = np.where(found_ED, warm_ED & planned_ED, cold_ED | unplanned_ED)
        return may

    def may_be_warm(self, layer: int, found_ED: BoolArray) -> BoolArray:
        """Where a reader may have found a replica warm, planned or not, or not, as it says."""
        warm_ED, cold_ED = self._range(self._warm(layer))
        may: BoolArray = np.where(found_ED, warm_ED, cold_ED)
        return may

    def _warm(self, layer: int) -> Iterator[ReplicaArray]:
        yield self._board.warm_LED[layer]
        for state in self._states:
            yield state.warm_LED[layer]

    def _planned(self, layer: int) -> Iterator[ReplicaArray]:
        yield self._board.planned_LED[layer]
        for state in self._states:
            yield state.planned_LED[layer]

    @staticmethod
    def _range(found: Iterator[ReplicaArray]) -> tuple[BoolArray, BoolArray]:
        """Where some array is above 0, and where some is 0."""
        arrays = [array > 0 for array in found]
        return np.logical_or.reduce(arrays), ~np.logical_and.reduce(arrays)
