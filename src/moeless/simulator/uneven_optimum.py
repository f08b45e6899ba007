"""The least time of any lossless split over devices of unequal speed. Needs scipy.

One plain mixed-integer program, as everything counts there: which devices are used at all, which
experts they touch, and their tokens.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray, ReplicaArray
from moeless.errors import PlanError

RELATIVE_GAP = 1e-3
"""How near to its bound a mixed-integer program is solved."""

BoolArray = NDArray[np.bool_]


def usable_pairs(count_E: CountArray, replicas_ED: ReplicaArray | BoolArray) -> NDArray[np.int64]:
    """(expert, device) of every replica of an expert with tokens [N, 2].

    Raises:
        PlanError: Tokens for an expert without a replica.
    """
    usable_ED = (replicas_ED > 0) & (count_E > 0)[:, None]
    stranded = np.flatnonzero((count_E > 0) & ~usable_ED.any(axis=1))
    if len(stranded):
        expert = int(stranded[0])
        raise PlanError(f"expert {expert}: {count_E[expert]} tokens but no replica")
    return np.argwhere(usable_ED)


def least_time_uneven(
    count_E: CountArray,
    replicas_ED: ReplicaArray | BoolArray,
    cost: LayerCost,
    *,
    limit_s: float,
) -> float | None:
    """The least time of a layer in seconds, transfers included.

    Args:
        count_E: Tokens of each expert, int64 [E]; some are positive.
        replicas_ED: Where each expert may run [E, D]; any positive number is one replica.
        cost: What experts and tokens cost, with speeds.
        limit_s: Seconds after which it is given up.

    Returns:
        Seconds, or None where the program was not solved in time.

    Raises:
        PlanError: Tokens for an expert without a replica.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    pairs_N2 = usable_pairs(count_E, replicas_ED)
    expert_N, device_N = pairs_N2.T
    size, devices = len(pairs_N2), replicas_ED.shape[1]
    slowness_D = 1.0 / cost.speed_D(devices)
    unit_s = cost.token_s
    touch, base = cost.touch_s / unit_s, cost.base_s / unit_s
    # Variables: tokens [N], touched [N], used [D], the slowest time, the fullest device's tokens.
    width = 2 * size + devices + 2
    tokens, touched = np.arange(size), np.arange(size, 2 * size)
    used, slowest, fullest = np.arange(2 * size, width - 2), width - 2, width - 1
    active_A, row_N = np.unique(expert_N, return_inverse=True)
    each_once = np.zeros((len(active_A), width))
    each_once[row_N, tokens] = 1.0
    total_A = count_E[active_A].astype(np.float64)
    count_N = count_E[expert_N].astype(np.float64)
    where_touched = np.zeros((size, width))
    where_touched[tokens, tokens] = 1.0
    where_touched[tokens, touched] = -count_N
    where_used = np.zeros((size, width))
    where_used[tokens, touched] = 1.0
    where_used[tokens, used[device_N]] = -1.0
    in_time = np.zeros((devices, width))
    in_time[device_N, tokens] = slowness_D[device_N]
    in_time[device_N, touched] = touch * slowness_D[device_N]
    in_time[np.arange(devices), used] = base * slowness_D
    in_time[:, slowest] = -1.0
    in_room = np.zeros((devices, width))
    in_room[device_N, tokens] = 1.0
    in_room[:, fullest] = -1.0
    goal = np.zeros(width)
    goal[slowest], goal[fullest] = 1.0, 2 * cost.transfer_s / unit_s
    most = np.concatenate([count_N, np.ones(size + devices), [np.inf, np.inf]])
    whole = np.ones(width)
    whole[-2:] = 0.0
    at_most_0 = [where_touched, where_used, in_time, in_room]
    result = milp(
        goal,
        constraints=[
            LinearConstraint(each_once, total_A, total_A),
            *(LinearConstraint(matrix, -np.inf, 0.0) for matrix in at_most_0),
        ],
        integrality=whole,
        bounds=Bounds(0, most),
        options={"time_limit": limit_s, "mip_rel_gap": RELATIVE_GAP},
    )
    return unit_s * float(result.fun) if result.status == 0 else None
