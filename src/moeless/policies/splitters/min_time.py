"""The default splitter: all devices finish together, under the time model in force."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray
from moeless.errors import PlanError
from moeless.policies.kernels.fixed_charge import min_time_split
from moeless.policies.kernels.seats import Seats, fill_seats
from moeless.policies.kernels.token_flow import order_by_count


class MinTimeSplitter:
    """Divides tokens so that the slowest device finishes as early as possible.

    Where touching an expert costs nothing (the paper's time model) that is the exact min-max of
    tokens; otherwise a heuristic for the fixed-charge problem, and mostly the optimum.

    Args:
        cost: What experts and tokens cost; by default tokens only.

    Cost on the token path: compiled loops, 4 us at E = 16, D = 8 and about 100 us at E = 256,
    D = 64 (``benchmarks/bench_decisions.py``).
    """

    def __init__(self, cost: LayerCost | None = None) -> None:
        self._cost = cost or LayerCost(token_s=1.0)
        self._price_XD = np.ones((3, 0))
        self._seats = Seats(0, 0)
        self._order_E: CountArray = np.arange(0)

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
        experts, devices = replicas_ED.shape
        seats = self._seats
        if seats.seat_ED.shape != replicas_ED.shape:
            self._seats = seats = Seats(experts, devices)
            self._order_E = np.arange(experts)
            self._price_XD = self._cost.price_XD(devices)
        if np.minimum.reduce(count_E, initial=0) < 0:
            expert = int(np.argmin(count_E))
            raise PlanError(f"expert {expert}: {count_E[expert]} tokens; counts are not negative")
        lists = (seats.seat_ED, seats.seats_E, seats.guest_DE, seats.guests_D)
        usable_ED = np.ascontiguousarray(replicas_ED).view(np.uint8)
        stranded = fill_seats(count_E, usable_ED, *lists)
        if stranded >= 0:
            raise PlanError(
                f"expert {stranded}: {count_E[stranded]} tokens but no usable replica; "
                f"load one first"
            )
        tokens_ED = np.empty((experts, devices), dtype=np.int64)
        load_D = np.empty(devices, dtype=np.int64)
        order_by_count(count_E, self._order_E)
        min_time_split(count_E, self._order_E, *lists, tokens_ED, load_D, self._price_XD)
        return tokens_ED
