"""Divides each expert's tokens evenly over its usable replicas."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import PlanError
from moeless.policies.splitters.equal_shares import EqualShares


class EvenSplitter:
    """Equal shares per device, in whole tokens; see ``EqualShares``.

    Source: the even split of MoEless paper, section 4.2.
    """

    def __init__(self) -> None:
        self._shares = EqualShares()

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
        return self._shares.divide(count_E, usable_ED)


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
