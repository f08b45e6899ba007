"""The least time that any lossless split over given replicas takes. Needs scipy.

The yardstick of splitters, so it shares nothing with them: exact programs, solved by HiGHS, far
too slow for the token path.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray, ReplicaArray
from moeless.errors import MissingExtraError
from moeless.simulator.uneven_optimum import (
    RELATIVE_GAP,
    BoolArray,
    least_time_uneven,
    usable_pairs,
)

TIME_LIMIT_S = 2.0
"""Seconds after which a mixed-integer program is given up."""


def require_scipy() -> None:
    """Say early that nothing can be solved.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        import scipy.optimize  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "the optimum needs scipy; run pip install 'moeless[replay]'"
        ) from error


def least_tokens(count_E: CountArray, replicas_ED: ReplicaArray | BoolArray) -> int:
    """The fewest tokens that the fullest device can have: a linear program, rounded up.

    The program's matrix is one of flows, so whole tokens reach its value rounded up.

    Args:
        count_E: Tokens of each expert, int64 [E].
        replicas_ED: Where each expert may run [E, D]; any positive number is one replica.

    Raises:
        PlanError: Tokens for an expert without a replica.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    pairs_N2 = usable_pairs(count_E, replicas_ED)
    devices, size = replicas_ED.shape[1], len(pairs_N2)
    if not size:
        return 0
    active_A, expert_N = np.unique(pairs_N2[:, 0], return_inverse=True)
    variable_N, one_N = np.arange(size), np.ones(size)
    whole = coo_array((one_N, (expert_N, variable_N)), shape=(len(active_A), size + 1))
    held = coo_array(
        (
            np.concatenate([one_N, -np.ones(devices)]),
            (
                np.concatenate([pairs_N2[:, 1], np.arange(devices)]),
                np.concatenate([variable_N, np.full(devices, size)]),
            ),
        ),
        shape=(devices, size + 1),
    )
    goal = np.zeros(size + 1)
    goal[-1] = 1.0
    result = linprog(
        goal,
        A_ub=held.tocsr(),
        b_ub=np.zeros(devices),
        A_eq=whole.tocsr(),
        b_eq=count_E[active_A].astype(np.float64),
        method="highs",
    )
    # The value is a sum of counts over at most D devices: a multiple of 1 / n, n at most D.
    return int(np.ceil(result.fun - 0.5 / devices))


def least_time(
    count_E: CountArray,
    replicas_ED: ReplicaArray | BoolArray,
    cost: LayerCost,
    *,
    limit_s: float = TIME_LIMIT_S,
) -> float | None:
    """The least time of a layer in seconds, transfers included.

    Where touching an expert costs nothing, that is the time of ``least_tokens``. Otherwise it is
    a mixed-integer program, solved to a relative gap of 0.1%.

    Args:
        count_E: Tokens of each expert, int64 [E].
        replicas_ED: Where each expert may run [E, D]; any positive number is one replica.
        cost: What experts and tokens cost.
        limit_s: Seconds after which it is given up.

    Returns:
        Seconds, or None where the program was not solved in time.

    Raises:
        PlanError: Tokens for an expert without a replica.
    """
    if not count_E.any():
        return 0.0
    if cost.speeds:
        return least_time_uneven(count_E, replicas_ED, cost, limit_s=limit_s)
    if cost.touch_s == 0:
        most = least_tokens(count_E, replicas_ED)
        return cost.base_s + (cost.token_s + 2 * cost.transfer_s) * most
    solved_s = _solve_with_touches(count_E, replicas_ED, cost, limit_s)
    return None if solved_s is None else cost.base_s + solved_s


def _solve_with_touches(
    count_E: CountArray, replicas_ED: ReplicaArray | BoolArray, cost: LayerCost, limit_s: float
) -> float | None:
    """Least time beyond the launch; None where it was not found in time.

    Only experts with a choice have variables: the tokens of each replica, and whether it is
    touched. The last two are the slowest device's time and the fullest one's tokens. Times are in
    tokens.
    """
    from scipy.optimize import Bounds, milp

    touch, both_ways = cost.touch_s / cost.token_s, 2 * cost.transfer_s / cost.token_s
    pairs_N2 = usable_pairs(count_E, replicas_ED)
    choices_E = np.bincount(pairs_N2[:, 0], minlength=len(count_E))
    fixed_N2 = pairs_N2[choices_E[pairs_N2[:, 0]] == 1]
    open_N2 = pairs_N2[choices_E[pairs_N2[:, 0]] > 1]
    devices, size = replicas_ED.shape[1], len(open_N2)
    fixed_tokens_D = np.zeros(devices)
    np.add.at(fixed_tokens_D, fixed_N2[:, 1], count_E[fixed_N2[:, 0]])
    fixed_time_D = fixed_tokens_D + touch * np.bincount(fixed_N2[:, 1], minlength=devices)
    if not size:
        return cost.token_s * float(fixed_time_D.max() + both_ways * fixed_tokens_D.max())

    count_N = count_E[open_N2[:, 0]].astype(np.float64)
    goal = np.concatenate([np.zeros(2 * size), [1.0, both_ways]])
    whole = np.concatenate([np.ones(2 * size), [0.0, 0.0]])
    most = np.concatenate([count_N, np.ones(size), [np.inf, np.inf]])
    result = milp(
        goal,
        constraints=[
            _each_token_once(open_N2[:, 0], count_E),
            _touched_where_used(count_N),
            *_within_the_most(open_N2[:, 1], touch, fixed_time_D, fixed_tokens_D),
        ],
        integrality=whole,
        bounds=Bounds(0, most),
        options={"time_limit": limit_s, "mip_rel_gap": RELATIVE_GAP},
    )
    return cost.token_s * float(result.fun) if result.status == 0 else None


def _each_token_once(expert_N: NDArray[np.int64], count_E: CountArray) -> object:
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_array

    size = len(expert_N)
    active_A, row_N = np.unique(expert_N, return_inverse=True)
    matrix = coo_array(
        (np.ones(size), (row_N, np.arange(size))), shape=(len(active_A), 2 * size + 2)
    )
    total_A = count_E[active_A].astype(np.float64)
    return LinearConstraint(matrix.tocsr(), total_A, total_A)


def _touched_where_used(count_N: NDArray[np.float64]) -> object:
    from scipy.optimize import LinearConstraint
    from scipy.sparse import diags_array, hstack

    size = len(count_N)
    matrix = hstack([diags_array(np.ones(size)), diags_array(-count_N), np.zeros((size, 2))])
    return LinearConstraint(matrix.tocsr(), -np.inf, np.zeros(size))


def _within_the_most(
    device_N: NDArray[np.int64],
    touch: float,
    fixed_time_D: NDArray[np.float64],
    fixed_tokens_D: NDArray[np.float64],
) -> tuple[object, object]:
    from scipy.optimize import LinearConstraint

    size, devices = len(device_N), len(fixed_time_D)
    on_device_DN = (device_N[None, :] == np.arange(devices)[:, None]).astype(np.float64)
    one_D1, none_D1 = np.ones((devices, 1)), np.zeros((devices, 1))
    time = np.hstack([on_device_DN, touch * on_device_DN, -one_D1, none_D1])
    tokens = np.hstack([on_device_DN, np.zeros((devices, size)), none_D1, -one_D1])
    return (
        LinearConstraint(time, -np.inf, -fixed_time_D),
        LinearConstraint(tokens, -np.inf, -fixed_tokens_D),
    )
