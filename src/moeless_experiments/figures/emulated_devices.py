"""Layer times on eight emulated devices: each one's share really computed, one after another."""

from typing import Any

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Result
from moeless_experiments.measured.emulation_study import DEVICES, EmulatedTimes, study_devices
from moeless_experiments.measured.layer_shape import DTYPE, LAYERS
from moeless_experiments.measured.layer_tables import (
    DEFAULT,
    Times,
    error_finding,
    ratio_findings,
    time_plots,
    time_tables,
)
from moeless_experiments.measured.replaying import EPLB_INTERVAL_S, MEMORY_FACTOR, SIGMA
from moeless_experiments.measured.workload import STEP_S

_WHY = "CPU cores with small batches instead of GPUs, and nothing but the experts is timed"


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    study = study_devices(context)
    times = [_as_times(each) for each in study]
    return Result(
        provenance="emulated",
        tables=time_tables(times, seed=context.seed),
        plots=time_plots(times, "emulated"),
        findings=(
            *ratio_findings(times, seed=context.seed, intervals="steps", why=_WHY),
            error_finding(times, "emulated"),
        ),
        interpretation=_interpret(study, times, context.seed),
        config={
            "devices": f"{DEVICES}, one after another on one core; the longest counts",
            "layers": LAYERS,
            "dtype": DTYPE,
            "memory_factor": MEMORY_FACTOR,
            "forecasts": f"noisy:{SIGMA}, one layer ahead",
            "eplb_interval_steps": round(EPLB_INTERVAL_S / STEP_S),
            **{f"workload {each.workload.name}": _describe(each) for each in study},
        },
    )


def _as_times(each: EmulatedTimes) -> Times:
    return Times(
        name=each.workload.name,
        seconds=each.seconds,
        computing=each.seconds,
        simulated=each.simulated,
        # Emulation does not wait for loads, so layers that did say nothing of the time model.
        counted={name: ~blocked for name, blocked in each.blocked.items()},
        straggler=each.straggler,
    )


def _describe(each: EmulatedTimes) -> dict[str, Any]:
    cost = each.cost
    return {
        "routing": each.workload.source,
        "shape": str(each.workload.shape),
        "steps": f"{len(each.seconds['static'])} of {len(each.workload.ids)}",
        "fitted_us": {
            name: round(1e6 * getattr(cost, f"{name}_s"), 3) for name in ("base", "touch", "token")
        },
    }


def _interpret(study: list[EmulatedTimes], times: list[Times], seed: int) -> str:
    parts, slower = [], []
    for each in times:
        static, eplb = (each.ratio(DEFAULT, other, seed=seed) for other in ("static", "eplb"))
        parts.append(
            f"{each.name} {static.as_change()} against static and {eplb.as_change()} against "
            f"EPLB (tokens alone: {-100 * each.gap():.1f}% at best)"
        )
        if static.low > 1:
            slower.append(each.name)
    worth = {each.workload.shape.name: each.cost.touch_s / each.cost.token_s for each in study}
    weights = ", ".join(f"{count:.0f} tokens' for {name}" for name, count in worth.items())
    text = (
        f"Mean layer time of the default policy: {'; '.join(parts)}. Touching an expert takes "
        f"{weights}, so halving an expert's tokens does not halve its time. In small batches the "
        f"right answer is to split little. {_judge_eplb(times, seed)}"
    )
    if slower:
        text += (
            f"\n\nThe default is slower than static placement on {', '.join(slower)}. "
            "Why was not isolated."
        )
    return text


def _judge_eplb(times: list[Times], seed: int) -> str:
    """Where balancing tokens alone loses."""
    ratios = {each.name: each.ratio("eplb", "static", seed=seed) for each in times}
    lost = [f"{name} {ratio.as_change()}" for name, ratio in ratios.items() if ratio.low > 1]
    if not lost:
        return "EPLB, which minds tokens only, is nowhere slower than static placement for it."
    return (
        "EPLB, which minds tokens only, is slower than static placement on "
        f"{'; '.join(lost)} for it."
    )


EXPERIMENT = Experiment(
    id="emulated-devices",
    title="Layer times on eight emulated devices",
    claim=(
        "MoEless reduces the mean layer forward time by 43.19% against Megatron-LM's static "
        "expert parallelism and by 21.89% against EPLB (8 GPUs). Asked here: what does it save "
        "when the shares of eight devices are really computed, and does the simulator foretell it?"
    ),
    run=run,
    alone=True,
)
