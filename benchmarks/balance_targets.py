"""What the default policy should reach in a replay, and whether it did.

Under the paper's time model balance counts: max device tokens over the ideal, from 16 assignments
per device up, within so many loads. Under GPU time models layer time counts: over the lower bound,
and never more than that of static or eplb.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

FEWEST_PER_DEVICE = 16
"""Assignments per device from which balance is judged."""

MANY_PER_DEVICE = 64

TIE = 1e-4
"""Layer times nearer than this to one another are a tie; models of time are wrong by percents."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Ceilings of the straggler ratio's mean and p99, and of loads per layer-step."""

    mean: float
    p99: float
    cold: float

    def __str__(self) -> str:
        return f"ratio {self.mean:g} (p99 {self.p99:g}), loads {self.cold:g}"


def balance_target(experts: int, devices: int, factor: float, per_device: float) -> Balance | None:
    """The target for so much memory, if there is one.

    Args:
        experts: E.
        devices: D.
        factor: Replicas over E.
        per_device: Assignments per device, typically.
    """
    if factor == 2.0:
        return Balance(mean=1.005, p99=1.03, cold=0.01)
    if factor == 1.5 and experts == devices:
        return Balance(mean=1.08, p99=1.28, cold=0.08)
    if factor == 1.5 and experts >= 4 * devices:
        return Balance(mean=1.005, p99=1.05, cold=0.03)
    if factor == 1.25 and experts >= 4 * devices:
        if per_device >= MANY_PER_DEVICE:
            return Balance(mean=1.03, p99=1.12, cold=0.05)
        return Balance(mean=1.06, p99=1.32, cold=0.05)
    return None


def judge_balance(target: Balance, device_tokens_SLD: np.ndarray, cold: float) -> dict[str, Any]:
    """Hold a dump's device tokens against a target.

    One token over the ideal is always within it: no integer is nearer where the mean is small.

    Args:
        target: The target.
        device_tokens_SLD: Tokens that each device computed, all steps.
        cold: Loads per layer-step.
    """
    measured_SLD = device_tokens_SLD[len(device_tokens_SLD) // 10 :]
    total_SL = measured_SLD.sum(axis=2)
    judged_SL = total_SL >= FEWEST_PER_DEVICE * device_tokens_SLD.shape[2]
    ideal_N = -(-total_SL[judged_SL] // device_tokens_SLD.shape[2])
    most_N = measured_SLD.max(axis=2)[judged_SL]
    within_N = most_N <= np.maximum(ideal_N * target.p99, ideal_N + 1)
    mean = float((most_N / ideal_N).mean()) if len(ideal_N) else float("nan")
    met = mean <= target.mean and within_N.mean() >= 0.99 and cold <= target.cold
    return {
        "target": str(target),
        "judged_mean": round(mean, 5),
        "judged_within": round(float(within_N.mean()), 5),
        "judged_share": round(float(judged_SL.mean()), 3),
        "met": "yes" if met else "no",
    }


def judge_layer_time(experts: int, devices: int, policies: dict[str, Any]) -> dict[str, Any]:
    """Hold layer times of ``moeless`` against the bound and against static and eplb.

    ``met`` is "tie" where it is behind one of them, but by less than ``TIE``.

    Args:
        experts: E.
        devices: D.
        policies: The report's figures of all policies.
    """
    found = policies["moeless"]
    ceiling = 1.15 if experts == devices else 1.03 if experts >= 4 * devices else None
    bound = found["bound_ratio"]["mean"]
    behind = max(
        found["layer_forward_ms"][point] / policies[other]["layer_forward_ms"][point] - 1
        for other in {"static", "eplb"} & policies.keys()
        for point in ("mean", "p99")
    )
    is_near = ceiling is None or bound <= ceiling
    met = "no" if not is_near or behind > TIE else "yes" if behind <= 1e-9 else "tie"
    over_bound = "" if ceiling is None else f"bound ratio {ceiling:g}, "
    return {
        "target": f"{over_bound}mean and p99 no slower than static and eplb",
        "met": met,
    }
