"""Equal shares in whole tokens; what the splitters ``even`` and ``slots`` have in common."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray

_KNOWN_PLACEMENTS = 256
"""Placements whose device lists are kept; a model has one per layer at a time."""


class EqualShares:
    """Divides each expert's tokens so that its copies' shares differ by at most one token.

    First every copy gets the whole part of its share; then the tokens left over go, expert by
    expert in index order, to the copies on the devices with the fewest tokens so far (ties:
    lowest index), so that left-over tokens do not pile up on the first device.

    Cost on the token path: a few numpy calls, plus a short loop over the experts that have tokens
    left over.
    """

    def __init__(self) -> None:
        self._devices_E: dict[tuple[tuple[int, ...], bytes], list[list[int]]] = {}

    def divide(self, count_E: CountArray, copies_ED: NDArray[np.generic]) -> CountArray:
        """Divide tokens.

        Args:
            count_E: Tokens routed to each expert, int64 [E], not negative.
            copies_ED: Copies [E, D], bool or unsigned or signed integers that are not negative;
                at least one where ``count_E`` is positive.

        Returns:
            Tokens of each device, int64 [E, D].
        """
        devices_E = self._devices_of_copies(copies_ED)
        copies_E = np.add.reduce(copies_ED, axis=1, dtype=np.int64)
        whole_E, left_E = np.divmod(count_E, np.maximum(copies_E, 1))
        share_ED: CountArray = np.multiply(whole_E[:, None], copies_ED, dtype=np.int64)
        rows = left_E.nonzero()[0].tolist()
        if not rows:
            return share_ED
        left = left_E.tolist()
        tokens: list[int] = np.add.reduce(share_ED, axis=0).tolist()
        for expert in rows:
            # min and sorted are stable, so equally loaded devices stay in index order.
            if left[expert] == 1:
                chosen = [min(devices_E[expert], key=tokens.__getitem__)]
            else:
                chosen = sorted(devices_E[expert], key=tokens.__getitem__)[: left[expert]]
            for device in chosen:
                share_ED[expert, device] += 1
                tokens[device] += 1
        return share_ED

    def _devices_of_copies(self, copies_ED: NDArray[np.generic]) -> list[list[int]]:
        """The device of each expert's copies; plans change seldom, so keep a few."""
        key = (copies_ED.shape, copies_ED.tobytes())
        known = self._devices_E.get(key)
        if known is None:
            if len(self._devices_E) >= _KNOWN_PLACEMENTS:
                self._devices_E.clear()
            devices_D = np.arange(copies_ED.shape[1])
            known = [np.repeat(devices_D, row_D).tolist() for row_D in copies_ED]
            self._devices_E[key] = known
        return known
