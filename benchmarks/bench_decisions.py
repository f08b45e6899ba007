"""How long one decision takes, per layer: the plan, the split, and the search beside the path.

Run ``python benchmarks/bench_decisions.py``; it prints p50 and p99 in microseconds for several
numbers of experts E and devices D, with 100,000 assignments a step whose shares drift. With
``--grow DIR`` it measures E and D up to 512 and writes ``decision_times.csv`` and a plot there.
Times are CPU times of the deciding thread: what else the machine does counts only by what it
takes of the caches. Give it one core: ``OMP_NUM_THREADS=1 taskset -c 0 python ...``.
"""

import argparse
import csv
from pathlib import Path
from time import thread_time

import numpy as np
from provenance import provenance

from moeless.core.layer_cost import LayerCost
from moeless.core.plan import PlanRequest
from moeless.policies.planners import PLANNERS
from moeless.policies.planners.moeless import MoelessPlanner
from moeless.policies.splitters import SPLITTERS
from moeless.telemetry.percentiles import percentiles

SIZES = ((8, 2), (16, 8), (64, 8), (256, 8), (256, 64))
GROWTH = (8, 16, 32, 64, 128, 256, 512)
ASSIGNMENTS = 100_000
TOKENS_ONLY = LayerCost(token_s=1e-6)
H200 = LayerCost(base_s=65e-6, touch_s=72e-6, token_s=0.637e-6)
MEMORY_FACTOR = 1.5


def drifting_counts(experts: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Loads of a power law whose shares move by a few percent a step, int64 [steps, E]."""
    log_share = np.log(rng.permutation(np.arange(1, experts + 1) ** -0.7))
    counts = []
    for _ in range(steps):
        log_share += 0.03 * rng.standard_normal(experts)
        share = np.exp(log_share - log_share.max())
        counts.append(rng.multinomial(ASSIGNMENTS, share / share.sum()))
    return np.array(counts, dtype=np.int64)


def planners(cost: LayerCost) -> dict[str, object]:
    """The planners to compare, at the same memory."""
    return {
        "static": PLANNERS.create("static"),
        "eplb": PLANNERS.create("eplb", memory_factor=MEMORY_FACTOR),
        "paper": PLANNERS.create("paper", memory_factor=MEMORY_FACTOR),
        "moeless": MoelessPlanner(cost, memory_factor=MEMORY_FACTOR),
    }


def measure(
    name: str, cost: LayerCost, experts: int, devices: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of each plan, split and search."""
    planner = planners(cost)[name]
    options = {"cost": cost} if name == "moeless" else {}
    splitter = SPLITTERS.create(
        {"moeless": "min_time", "eplb": "slots"}.get(name, "even"), **options
    )
    previous = np.zeros((experts, devices), dtype=np.uint8)
    slots = -(-int(MEMORY_FACTOR * experts) // devices)
    capacity = np.full(devices, max(1, slots), dtype=np.int64)
    seconds: dict[str, list[float]] = {"plan": [], "split": [], "search": []}

    def timed(what, call):
        start = thread_time()
        result = call()
        seconds[what].append(thread_time() - start)
        return result

    expected = np.ones(experts)
    counts = drifting_counts(experts, steps, np.random.default_rng(experts * 1000 + devices))
    for step, count in enumerate(counts):
        request = PlanRequest(
            step=step,
            layer=0,
            load_E=expected,
            previous_ED=previous,
            alive_ED=previous,
            capacity_D=capacity,
        )
        previous = timed("plan", lambda r=request: planner.plan(r)).replicas_ED
        usable = previous if name == "eplb" else previous.astype(bool)
        timed("split", lambda c=count, u=usable: splitter.split(c, u))
        expected = count.astype(np.float64)
        if name == "moeless":
            planner.observe(step=step, layer=0, load_E=expected)
            if planner.search_due(0):
                timed("search", lambda: planner.search(0))
    return {what: values[10:] if what != "search" else values for what, values in seconds.items()}


def summary(values: list[float], key: str) -> float:
    """A percentile in microseconds; NaN without samples."""
    return percentiles(values)[key] * 1e6 if values else float("nan")


def print_table(steps: int) -> None:
    """Sizes that are common, all planners."""
    print("                        plan us          split us         search us (beside the path)")
    print("planner      E    D     p50      p99      p50      p99      p50      p99")
    for experts, devices in SIZES:
        for name, cost in (
            ("static", TOKENS_ONLY),
            ("eplb", TOKENS_ONLY),
            ("paper", TOKENS_ONLY),
            ("moeless", TOKENS_ONLY),
            ("moeless", H200),
        ):
            label = name + ("*" if cost is H200 else "")
            found = measure(name, cost, experts, devices, steps)
            cells = " ".join(
                f"{summary(found[what], key):8.1f}"
                for what in ("plan", "split", "search")
                for key in ("p50", "p99")
            )
            print(f"{label:9} {experts:4} {devices:4} {cells}", flush=True)
    print("* under an H200 time model, where touching an expert costs 113 tokens' time")


def grow(directory: Path, steps: int) -> None:
    """Measure growth and plot it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for what, pairs in (
        ("E", [(n, 8) for n in GROWTH]),
        ("D", [(512, n) for n in GROWTH]),
    ):
        for experts, devices in pairs:
            for name in ("eplb", "paper", "moeless"):
                found = measure(name, TOKENS_ONLY, experts, devices, steps)
                rows.append(
                    {
                        "grows": what,
                        "experts": experts,
                        "devices": devices,
                        "planner": name,
                        "plan_p50_us": round(summary(found["plan"], "p50"), 1),
                        "plan_p99_us": round(summary(found["plan"], "p99"), 1),
                        "split_p50_us": round(summary(found["split"], "p50"), 1),
                        "split_p99_us": round(summary(found["split"], "p99"), 1),
                        "search_p50_us": round(summary(found["search"], "p50"), 1),
                    }
                )
                print(rows[-1], flush=True)
    with (directory / "decision_times.csv").open("w", newline="", encoding="utf-8") as file:
        file.write(provenance("measured: CPU time of one thread") + "\n")
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (what, title) in zip(
        axes, (("E", "experts (8 devices)"), ("D", "devices (512 experts)")), strict=True
    ):
        for name in ("eplb", "paper", "moeless"):
            mine = [r for r in rows if r["grows"] == what and r["planner"] == name]
            x = [r["experts" if what == "E" else "devices"] for r in mine]
            axis.plot(x, [r["plan_p50_us"] for r in mine], marker="o", label=f"{name}: plan")
            if name == "moeless":
                axis.plot(x, [r["split_p50_us"] for r in mine], marker="s", ls="--", label="split")
        axis.set(xscale="log", yscale="log", xlabel=title)
        axis.set_xticks(GROWTH, [str(n) for n in GROWTH])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds per layer (p50)")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(directory / "decision_times.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--grow", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.grow:
        grow(arguments.grow, min(arguments.steps, 120))
    else:
        print_table(arguments.steps)


if __name__ == "__main__":
    main()
