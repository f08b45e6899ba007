"""Layer times on real workers: two worker processes, each on a core of its own."""

from typing import Any

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Result
from moeless_experiments.measured.layer_shape import DTYPE, LAYERS
from moeless_experiments.measured.layer_tables import (
    DEFAULT,
    Times,
    error_finding,
    ratio_findings,
    time_plots,
    time_tables,
)
from moeless_experiments.measured.replaying import MEMORY_FACTOR, SIGMA
from moeless_experiments.measured.worker_study import Sizes, WorkerTimes, study_workers
from moeless_experiments.measured.workers import BETWEEN_S, DEVICES

_WHY = f"{DEVICES} devices, which are CPU cores, instead of 8 GPUs"


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    study, sizes = study_workers(context), Sizes.of(context)
    times = [_as_times(each) for each in study]
    return Result(
        provenance="measured",
        tables=time_tables(times, seed=context.seed),
        plots=time_plots(times, "measured"),
        findings=(
            *ratio_findings(
                times,
                seed=context.seed,
                intervals=f"{sizes.alternations} alternations",
                why=_WHY,
            ),
            Finding(
                what="the slowest device's computing alone, default policy against static EP",
                ours="; ".join(
                    f"{each.name} {100 * (each.computing_ratio(DEFAULT, 'static') - 1):+.1f}%"
                    for each in times
                ),
            ),
            error_finding(times, "measured"),
        ),
        interpretation=_interpret(times, context.seed),
        config={
            "devices": f"{DEVICES} worker processes, one thread and one core each",
            "layers": LAYERS,
            "dtype": DTYPE,
            "memory_factor": MEMORY_FACTOR,
            "forecasts": f"noisy:{SIGMA}, one layer ahead",
            "between_layers_s": BETWEEN_S,
            "alternations": sizes.alternations,
            "steps_per_turn": sizes.block,
            "eplb_interval_s": sizes.eplb_interval_s,
            **{f"workload {each.workload.name}": _describe(each) for each in study},
        },
    )


def _as_times(each: WorkerTimes) -> Times:
    return Times(
        name=each.workload.name,
        seconds=each.seconds,
        computing=each.computing,
        simulated=each.simulated,
        counted={name: np.ones_like(s, dtype=np.bool_) for name, s in each.seconds.items()},
        straggler=each.straggler,
    )


def _describe(each: WorkerTimes) -> dict[str, Any]:
    cost = each.cost
    return {
        "routing": each.workload.source,
        "shape": str(each.workload.shape),
        "tokens": [step.shape[1] for step in each.workload.ids[:1]]
        + [max(step.shape[1] for step in each.workload.ids)],
        "fitted_us": {
            name: round(1e6 * getattr(cost, f"{name}_s"), 3)
            for name in ("base", "touch", "token", "transfer")
        },
    }


def _interpret(times: list[Times], seed: int) -> str:
    faster, slower = [], []
    for each in times:
        for other in ("static", "eplb", "paper"):
            ratio = each.ratio(DEFAULT, other, seed=seed)
            if ratio.high < 1:
                faster.append(f"{other} on {each.name}")
            elif ratio.low > 1:
                slower.append(f"{other} on {each.name}")
    cases = 3 * len(times)
    said = (
        f"The default policy is faster than {', '.join(faster)}"
        if faster
        else ("The default policy is nowhere faster beyond doubt")
    )
    lost = f", and slower than {', '.join(slower)}" if slower else ", and nowhere slower"
    planning = "; ".join(
        f"{each.name} {100 * (each.computing_ratio(DEFAULT, 'static') - 1):+.1f}% of computing, "
        f"{100 * (each.ratio(DEFAULT, 'static', seed=seed).value - 1):+.1f}% of the layer's "
        f"{1e3 * float(each.seconds['static'].mean()):.1f} ms"
        for each in times
    )
    return (
        f"{said}{lost}; in the other {cases - len(faster) - len(slower)} of {cases} comparisons "
        "the 95% interval of the ratio includes 1. All policies run on the same routing in turns "
        "within one run, so that whatever else the machine does is shared by all.\n\n"
        "The two workers have all cores that there are, so whoever plans, moves replicas or wakes "
        "the supervisor takes time from them; static placement, which is planned once, is spared "
        f"that. Default against static: {planning}. {_compare_errors(times)} It is not the "
        "paper's setting, where planning runs on a host's own cores."
    )


def _compare_errors(times: list[Times]) -> str:
    """The simulator's error for those that plan, and for static placement, which does not."""
    static = float(np.mean([each.error_of_mean("static") for each in times]))
    planned = float(
        np.mean([each.error_of_mean(n) for each in times for n in each.seconds if n != "static"])
    )
    text = (
        "The simulator, which knows nothing of that, is off by "
        f"{static:+.1%} on average for static placement and {planned:+.1%} for those that plan"
    )
    return f"{text}: their planning is missing." if planned < static - 0.02 else f"{text}."


EXPERIMENT = Experiment(
    id="measured-layers",
    title="Layer times on real workers",
    claim=(
        "MoEless reduces the mean layer forward time by 43.19% against Megatron-LM's static "
        "expert parallelism and by 21.89% against EPLB (8 GPUs). Asked here: what is left of it "
        "on real workers of this machine, and does the simulator foretell it?"
    ),
    run=run,
    alone=True,
)
