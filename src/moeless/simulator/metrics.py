"""The figures of a replay, from its recording.

Symbols: S steps, L MoE layers, E logical experts, D devices; W tokens of an expert, Q tokens of a
layer-step (all its assignments), A experts among them that have any. The warm-up (the first 10%
of steps) is left out of every figure, and so are layer-steps without tokens.

EPLB may have several copies of an expert on a device. Numbers of replicas, the memory factor and
the accounting ``paper`` count each copy, as it takes a slot; loads, touched experts and the
accounting ``resident`` count the instance once, as its weights are on the device once here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.costs.pricing import PaperMeter, billed_gb_s, reserved_gb_s
from moeless.simulator.optimum_samples import compare_with_optimum
from moeless.simulator.recording import FloatArray, Recording, num_warm_up_steps
from moeless.telemetry.percentiles import percentiles, summarise


def straggler_ratio_SL(
    device_tokens_SLD: NDArray[np.int64], total_SL: NDArray[np.int64]
) -> FloatArray:
    """Max device tokens ÷ ceil(Q ÷ D), the least that is possible; NaN without tokens.

    Args:
        device_tokens_SLD: Tokens that each device computed [S, L, D].
        total_SL: Q of each layer-step [S, L].
    """
    ideal_SL = -(-total_SL // device_tokens_SLD.shape[2])
    most_SL = device_tokens_SLD.max(axis=2)
    ratio: FloatArray = np.full(total_SL.shape, np.nan)
    np.divide(most_SL, ideal_SL, out=ratio, where=total_SL > 0)
    return ratio


def bound_s_SL(loads_SLE: NDArray[np.generic], *, cost: LayerCost, num_devices: int) -> FloatArray:
    """``LayerCost.bound_s`` of every layer-step: no lossless split takes less time [S, L].

    Args:
        loads_SLE: W of each expert [S, L, E].
        cost: What experts and tokens cost.
        num_devices: D.
    """
    total_SL = loads_SLE.sum(axis=2, dtype=np.int64)
    active_SL = np.count_nonzero(loads_SLE, axis=2)
    bound_N = cost.bounds_s(total_SL.ravel(), active_SL.ravel(), num_devices)
    return bound_N.reshape(total_SL.shape)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What figures depend on besides the recording.

    Args:
        cost: What experts and tokens cost.
        num_devices: D.
        device_bytes: Memory of each device.
        function_bytes: Bytes of one expert.
        serverless: Whether the policy's experts are functions: in the paper's accounting it is
            then charged the running layer's replicas only.
        misc_bytes: M_misc of the paper's accounting.
    """

    cost: LayerCost
    num_devices: int
    device_bytes: int
    function_bytes: int
    serverless: bool
    misc_bytes: int = 0


def measure_policy(
    recording: Recording, loads_SLE: NDArray[np.generic], *, config: MetricsConfig
) -> dict[str, Any]:
    """The figures of one policy, ready for JSON.

    Args:
        recording: What happened.
        loads_SLE: Tokens of each expert [S, L, E].
        config: The rest.
    """
    first = num_warm_up_steps(recording.num_steps)
    loads_SLE = loads_SLE[first:]
    experts = loads_SLE.shape[2]
    total_SL = loads_SLE.sum(axis=2, dtype=np.int64)
    busy_SL = total_SL > 0
    layer_steps = max(int(busy_SL.sum()), 1)
    layer_s_SL = recording.layer_s_SL[first:]
    warm_SL = recording.warm_SL[first:]
    ratio_SL = straggler_ratio_SL(recording.device_tokens_SLD[first:], total_SL)
    bound_SL = bound_s_SL(loads_SLE, cost=config.cost, num_devices=config.num_devices)
    replicas = summarise(warm_SL[busy_SL])
    optimum = compare_with_optimum(recording)
    return {
        "straggler_ratio": summarise(ratio_SL[busy_SL]),
        "layer_forward_ms": summarise(layer_s_SL[busy_SL] * 1e3),
        "bound_ratio": summarise(layer_s_SL[busy_SL] / bound_SL[busy_SL]),
        "memory_factor": replicas["mean"] / experts,
        "replicas_per_layer": {"mean": replicas["mean"], "max": int(replicas["max"])},
        "cold_starts_per_layer_step": int(recording.cold_SL[first:].sum()) / layer_steps,
        "blocking_loads_per_layer_step": int(recording.blocking_SL[first:].sum()) / layer_steps,
        "gb_s": _gb_s(recording, first, config=config),
        "plan_us": percentiles(recording.plan_s * 1e6),
        "split_us": percentiles(recording.split_s * 1e6),
        "search": {
            "count": len(recording.search_s),
            **{f"{point}_us": s * 1e6 for point, s in percentiles(recording.search_s).items()},
        },
        "failed_plans": recording.failed_plans,
        **({} if optimum is None else {"optimum": optimum}),
    }


def count_idle_layer_steps(loads_SLE: NDArray[np.generic]) -> int:
    """Layer-steps after the warm-up that have no tokens."""
    measured_SLE = loads_SLE[num_warm_up_steps(len(loads_SLE)) :]
    return int((measured_SLE.sum(axis=2, dtype=np.int64) == 0).sum())


def _gb_s(recording: Recording, first: int, *, config: MetricsConfig) -> dict[str, float]:
    """The four accountings; wall time runs from the first measured step to the last one's end."""
    meter = PaperMeter(
        function_bytes=config.function_bytes,
        serverless=config.serverless,
        other_bytes=config.misc_bytes,
    )
    for layer_s_L, warm_L in zip(
        recording.layer_s_SL[first:].tolist(), recording.warm_SL[first:].tolist(), strict=True
    ):
        held = sum(warm_L)
        for layer_s, warm in zip(layer_s_L, warm_L, strict=True):
            meter.add(layer_s, layer_replicas=warm, all_replicas=held)
    resident_S = recording.resident_gb_s_S
    return {
        "billed": billed_gb_s(
            recording.busy_s_SL[first:].reshape(-1), function_bytes=config.function_bytes
        ),
        "resident": float(resident_S[-1] - resident_S[first]),
        "reserved": reserved_gb_s(
            recording.end_s - float(recording.start_s_S[first]),
            num_devices=config.num_devices,
            device_bytes=config.device_bytes,
        ),
        "paper": meter.gb_s,
    }
