"""The assignments of one layer that still have to be computed, round by round."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import UnavailableError
from moeless.functions.links.segment_status import FAILED, OK

_MOST_TRIES = 50
"""Demands of one layer in one step; each ends with its experts warm, if only for a moment."""


class OpenWork:
    """The assignments of one layer that still have to be computed.

    Assignments of one expert are contiguous once sorted; each open range of them is computed by
    one replica or, after a split, by several.
    """

    def __init__(self, count_E: CountArray, num_devices: int) -> None:
        self.open_E: CountArray = count_E
        self.failed_ED: NDArray[np.bool_] = np.zeros((len(count_E), num_devices), dtype=np.bool_)
        self.is_open = True
        self._start_E = np.cumsum(count_E) - count_E
        self._ranges: dict[int, list[tuple[int, int]]] | None = None
        self._tries = 0

    def count_try(self, layer: int) -> None:
        """Bound the rounds: experts that vanish again and again are fought over."""
        self._tries += 1
        if self._tries > _MOST_TRIES:
            raise UnavailableError(f"layer {layer}: experts do not stay warm long enough to run")

    def segments(self, share_ED: CountArray) -> list[NDArray[np.int32]]:
        """Turn shares into row ranges, per device."""
        if self._ranges is not None:
            return self._segments_of_rest(share_ED)
        if share_ED.shape[1] == 1:
            (experts,) = share_ED[:, 0].nonzero()
            start_n = self._start_E[experts]
            stop_n = start_n + share_ED[experts, 0]
            return [np.stack([experts, start_n, stop_n], axis=1).astype(np.int32)]
        devices, experts = share_ED.T.nonzero()
        rows = share_ED[experts, devices]
        stop_ED = np.cumsum(share_ED, axis=1)
        stop_ED += self._start_E[:, None]
        segments_n3 = np.empty((len(experts), 3), dtype=np.int32)
        segments_n3[:, 0] = experts
        segments_n3[:, 2] = stop_ED[experts, devices]
        segments_n3[:, 1] = segments_n3[:, 2] - rows
        bounds = np.searchsorted(devices, np.arange(share_ED.shape[1] + 1)).tolist()
        return [segments_n3[a:b] for a, b in itertools.pairwise(bounds)]

    def _segments_of_rest(self, share_ED: CountArray) -> list[NDArray[np.int32]]:
        """The same after a round that left gaps: an expert's rest may be in several ranges.

        A request has room for one segment per expert and device, so each replica takes part of
        the expert's first open range in this round.
        """
        assert self._ranges is not None
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(share_ED.shape[1])]
        for expert, ranges in self._ranges.items():
            if not ranges:
                continue
            start, stop = ranges[0]
            for device in np.flatnonzero(share_ED[expert]).tolist():
                last = min(stop, start + int(share_ED[expert, device]))
                if last > start:
                    rows[device].append((expert, start, last))
                start = last
        return [np.array(r, dtype=np.int32).reshape(-1, 3) for r in rows]

    def close(
        self,
        segments: Sequence[NDArray[np.int32]],
        status: Sequence[NDArray[np.uint8]],
        *,
        complete: bool,
    ) -> None:
        """Take what was computed out of what is open.

        Args:
            segments: What was handed out, per device.
            status: What became of it.
            complete: All that was open had been handed out.
        """
        if complete and self._ranges is None and not any(s.any() for s in status):
            self.is_open = False
            return
        if self._ranges is None:
            self._ranges = {
                int(e): [(int(self._start_E[e]), int(self._start_E[e] + self.open_E[e]))]
                for e in np.flatnonzero(self.open_E)
            }
            self.open_E = self.open_E.copy()
        for device, (segments_n3, status_n) in enumerate(zip(segments, status, strict=True)):
            for (expert, start, stop), state in zip(
                segments_n3.tolist(), status_n.tolist(), strict=True
            ):
                if state == OK:
                    self._ranges[expert] = _without(self._ranges[expert], start, stop)
                    self.open_E[expert] -= stop - start
                elif state == FAILED:
                    self.failed_ED[expert, device] = True
        self.is_open = bool(self.open_E.any())


def _without(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Cut [start, stop) out of sorted disjoint ranges."""
    rest = []
    for low, high in ranges:
        if low < min(high, start):
            rest.append((low, min(high, start)))
        if max(low, stop) < high:
            rest.append((max(low, stop), high))
    return rest
