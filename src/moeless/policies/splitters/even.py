"""Divides each expert's tokens evenly over its usable replicas."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import PlanError

_KNOWN_PLACEMENTS = 256
"""Placements whose device lists are kept; a model has one per layer at a time."""


class EvenSplitter:
    """Equal shares, in whole tokens.

    Shares of one expert differ by at most one token. First every replica gets the whole part of
    its share; then the tokens left over go, expert by expert in index order, to the replicas on
    the devices with the fewest tokens so far (ties: lowest index), so that left-over tokens do not
    pile up on the first device.

    Source: the even split of MoEless paper, section 4.2.
    Cost on the token path: a few numpy calls, plus a short loop over the experts that have tokens
    left over.
    """

    def __init__(self) -> None:
        self._devices_E: dict[tuple[tuple[int, ...], bytes], list[list[int]]] = {}

    def split(self, count_E: CountArray, replicas_ED: NDArray[np.bool_]) -> CountArray:
        """Divide tokens.

        Args:
            count_E: Tokens routed to each expert, int64 [E], not negative.
            replicas_ED: Usable replicas, bool [E, D]; at least one where ``count_E`` is positive.

        Returns:
            Tokens of each replica, int64 [E, D]; rows sum to ``count_E``, zero off the replicas.

        Raises:
            PlanError: A negative count, or tokens for an expert without a usable replica.
        """
        usable_ED = replicas_ED if replicas_ED.dtype == np.bool_ else replicas_ED.astype(np.bool_)
        reachable_E = np.logical_or.reduce(usable_ED, axis=1)
        reachable = np.count_nonzero(reachable_E)
        if np.minimum.reduce(count_E, initial=0) < 0:
            raise _negative_count(count_E)
        if reachable < len(count_E):
            _check_reachable(count_E, reachable_E)
        if np.count_nonzero(usable_ED) == reachable:
            # At most one usable replica per expert: it takes all tokens.
            return np.multiply(count_E[:, None], usable_ED, dtype=np.int64)
        return self._split_evenly(count_E, usable_ED)

    def _split_evenly(self, count_E: CountArray, usable_ED: NDArray[np.bool_]) -> CountArray:
        devices_E = self._devices_of_experts(usable_ED)
        replicas_E = np.add.reduce(usable_ED, axis=1, dtype=np.int64)
        whole_E, left_E = np.divmod(count_E, np.maximum(replicas_E, 1))
        share_ED: CountArray = np.multiply(whole_E[:, None], usable_ED, dtype=np.int64)
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

    def _devices_of_experts(self, usable_ED: NDArray[np.bool_]) -> list[list[int]]:
        """The devices of each expert's usable replicas; plans change seldom, so keep a few."""
        key = (usable_ED.shape, usable_ED.tobytes())
        known = self._devices_E.get(key)
        if known is None:
            if len(self._devices_E) >= _KNOWN_PLACEMENTS:
                self._devices_E.clear()
            known = [row.nonzero()[0].tolist() for row in usable_ED]
            self._devices_E[key] = known
        return known


def _negative_count(count_E: CountArray) -> PlanError:
    expert = int(np.argmin(count_E))
    return PlanError(f"expert {expert}: {count_E[expert]} tokens; counts are not negative")


def _check_reachable(count_E: CountArray, reachable_E: NDArray[np.bool_]) -> None:
    stranded = np.flatnonzero((count_E > 0) & ~reachable_E)
    if stranded.size:
        expert = int(stranded[0])
        raise PlanError(
            f"expert {expert}: {count_E[expert]} tokens but no usable replica; load one first"
        )
