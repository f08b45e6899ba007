"""Some layer-steps of a replay, held against the best split that their warm replicas allow."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import CountArray
from moeless.errors import PlanError
from moeless.simulator.optimum import TIME_LIMIT_S, least_time
from moeless.simulator.recording import FloatArray, Recording, num_warm_up_steps
from moeless.telemetry.percentiles import summarise


def sample_layer_steps(
    loads_SLE: NDArray[np.generic], count: int, *, seed: int
) -> tuple[tuple[int, int], ...]:
    """Draw layer-steps that have tokens, after the warm-up; the same ones for every policy.

    Args:
        loads_SLE: Tokens of each expert [S, L, E].
        count: How many; all there are if there are fewer.
        seed: Of the draw.

    Returns:
        (step, layer) of each, ascending.
    """
    first = num_warm_up_steps(len(loads_SLE))
    busy_M2 = np.argwhere(loads_SLE[first:].any(axis=2))
    rng = np.random.default_rng(seed)
    drawn_N = rng.choice(len(busy_M2), size=min(count, len(busy_M2)), replace=False)
    return tuple((first + step, layer) for step, layer in busy_M2[np.sort(drawn_N)].tolist())


def solve_samples(
    recording: Recording,
    loads_SLE: NDArray[np.generic],
    cost: LayerCost,
    *,
    limit_s: float = TIME_LIMIT_S,
) -> FloatArray:
    """Find the optimum of every sampled layer-step.

    Args:
        recording: With the replicas of its samples.
        loads_SLE: Tokens of each expert [S, L, E].
        cost: What experts and tokens cost.
        limit_s: Seconds for each.

    Returns:
        Seconds [N]: NaN where it was not found in time, infinite where an expert with tokens had
        no warm replica, so that they waited for a load.
    """
    optimum_s_N = np.full(len(recording.sample_N2), np.nan)
    for n, (step, layer) in enumerate(recording.sample_N2.tolist()):
        count_E: CountArray = loads_SLE[step, layer].astype(np.int64)
        try:
            found_s = least_time(count_E, recording.sample_NED[n], cost, limit_s=limit_s)
        except PlanError:
            found_s = np.inf
        if found_s is not None:
            optimum_s_N[n] = found_s
    return optimum_s_N


def compare_with_optimum(recording: Recording) -> dict[str, Any] | None:
    """The policy's time over the optimum, ready for JSON; None where nothing was sampled."""
    if not len(recording.optimum_s_N):
        return None
    step_N, layer_N = recording.sample_N2.T
    optimum_s_N = recording.optimum_s_N
    solved_N = np.isfinite(optimum_s_N)
    ratio_N = recording.layer_s_SL[step_N, layer_N][solved_N] / optimum_s_N[solved_N]
    return {
        "samples": len(optimum_s_N),
        "solved": int(solved_N.sum()),
        "timed_out": int(np.isnan(optimum_s_N).sum()),
        "waited": int(np.isinf(optimum_s_N).sum()),
        "ratio": summarise(ratio_N) if len(ratio_N) else None,
    }
