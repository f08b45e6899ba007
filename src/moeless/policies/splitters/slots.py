"""Divides tokens over slots, the way systems with EPLB do."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import PlanError
from moeless.policies.splitters.equal_shares import EqualShares


class SlotSplitter:
    """Equal shares per slot: a device that holds an expert in two slots gets two shares.

    What EPLB's own balance rests on. Where no device has an expert twice it divides as the
    splitter ``even`` does.
    """

    divides_by_copies = True

    def __init__(self) -> None:
        self._shares = EqualShares()

    def split(self, count_E: CountArray, replicas_ED: NDArray[np.generic]) -> CountArray:
        """Divide tokens.

        Args:
            count_E: Tokens routed to each expert, int64 [E], not negative.
            replicas_ED: Usable slots of each device per expert [E, D], any unsigned or signed
                integers, or bool.

        Returns:
            Tokens of each device, int64 [E, D]; rows sum to ``count_E``, zero off the slots.

        Raises:
            PlanError: A negative count, or tokens for an expert without a slot.
        """
        served_E = np.logical_or.reduce(replicas_ED, axis=1)
        if np.minimum.reduce(count_E, initial=0) < 0 or count_E[~served_E].any():
            expert = int(np.argmax((count_E < 0) | ((count_E > 0) & ~served_E)))
            raise PlanError(
                f"expert {expert}: {count_E[expert]} tokens for "
                f"{replicas_ED[expert].sum(dtype=np.int64)} usable slots; counts are not "
                f"negative, and an expert with tokens needs a slot"
            )
        return self._shares.divide(count_E, replicas_ED)
