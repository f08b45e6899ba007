"""How long one planning and one splitting decision take, per layer.

Run ``python benchmarks/bench_plan.py``; it prints p50 and p99 in microseconds for several numbers
of experts E and devices D. Loads follow a power law; each plan sees the one before it.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np

from moeless.core.plan import Plan, PlanRequest
from moeless.policies.planners import PLANNERS
from moeless.policies.splitters import SPLITTERS
from moeless.telemetry.percentiles import percentiles

EXPERTS = (8, 16, 64, 256)
DEVICES = (2, 8, 64)
ROUNDS = 400


def bench(name: str, experts: int, devices: int, rng: np.random.Generator) -> None:
    planner = PLANNERS.create(name)
    splitter = SPLITTERS.create("even")
    previous = np.zeros((experts, devices), dtype=np.uint8)
    capacity = np.full(devices, 2 * -(-experts // devices) + 1, dtype=np.int64)
    plan_s, split_s = [], []
    for step in range(ROUNDS):
        shares = rng.permutation(np.arange(1, experts + 1) ** -0.7)
        count = rng.multinomial(2048, shares / shares.sum())
        request = PlanRequest(
            step=step,
            layer=0,
            load_E=count.astype(np.float64),
            previous_ED=previous,
            alive_ED=previous,
            capacity_D=capacity,
        )
        plan: Plan = timed(plan_s, lambda r=request: planner.plan(r))
        previous = plan.replicas_ED
        warm = previous.astype(bool)
        timed(split_s, lambda c=count, w=warm: splitter.split(c, w))
    plan_us = {key: value * 1e6 for key, value in percentiles(plan_s[50:]).items()}
    split_us = {key: value * 1e6 for key, value in percentiles(split_s[50:]).items()}
    print(
        f"{name:8} {experts:4} {devices:4}   {plan_us['p50']:9.1f} {plan_us['p99']:9.1f}   "
        f"{split_us['p50']:9.1f} {split_us['p99']:9.1f}"
    )


def timed(samples: list[float], call: Callable[[], object]) -> object:
    start = perf_counter()
    result = call()
    samples.append(perf_counter() - start)
    return result


def main() -> None:
    rng = np.random.default_rng(0)
    print("planner     E    D    plan p50       p99   split p50       p99   (microseconds)")
    for name in ("static", "paper"):
        for experts in EXPERTS:
            for devices in DEVICES:
                bench(name, experts, devices, rng)


if __name__ == "__main__":
    main()
