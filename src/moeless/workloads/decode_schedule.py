"""Which requests decode in which slot of a time grid. Knows no experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeSchedule:
    """Request r decodes one token in each of ``length_R[r]`` slots from ``begin_R[r]`` on.

    Args:
        begin_R: First slot of each request, ascending, int64 [R].
        length_R: Tokens it generates, not negative, int64 [R].
    """

    begin_R: NDArray[np.int64]
    length_R: NDArray[np.int64]

    def busy_slots(self, limit: int) -> tuple[NDArray[np.int64], bool]:
        """Slots in which any request decodes.

        Args:
            limit: Return no more than this many, the first ones.

        Returns:
            The slots, ascending, and whether these are all.
        """
        ranges = [np.zeros(0, dtype=np.int64)]
        room, free_from = limit, 0
        for begin, length in zip(self.begin_R.tolist(), self.length_R.tolist(), strict=True):
            # Requests begin in order, so every slot from `free_from` on is still free.
            first, stop = max(begin, free_from), begin + length
            if stop <= first:
                continue
            ranges.append(np.arange(first, min(stop, first + room), dtype=np.int64))
            if stop - first > room:
                return np.concatenate(ranges), False
            room, free_from = room - (stop - first), stop
        return np.concatenate(ranges), True

    def active(self, slot_S: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Requests that decode in each slot, as indices in the order of their arrival.

        Args:
            slot_S: Slots, ascending.
        """
        end_R = self.begin_R + self.length_R
        known, active = 0, np.zeros(0, dtype=np.int64)
        for slot in slot_S:
            begun = int(np.searchsorted(self.begin_R, slot, side="right"))
            active = np.concatenate([active, np.arange(known, begun)])
            active = active[end_R[active] > slot]
            known = begun
            yield active
