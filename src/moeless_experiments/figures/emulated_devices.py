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

_WHY = (
    "CPU cores with small batches instead of GPUs, nothing but the experts is timed (no "
    "all-to-all, no attention), and the routing is less skewed than what the paper's ratios imply."
)


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
        interpretation=_interpret(times, context.seed),
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


def _interpret(times: list[Times], seed: int) -> str:
    parts = [
        f"{each.name}: {each.ratio(DEFAULT, 'static', seed=seed).as_change()} against static, "
        f"{each.ratio(DEFAULT, 'eplb', seed=seed).as_change()} against EPLB, where perfect "
        f"balance would take {100 * each.gap():.1f}% of the tokens off static's fullest device"
        for each in times
    ]
    return (
        "With eight devices there is more to balance than with two. Mean layer time of the "
        f"default policy: {'; '.join(parts)}. A device's time does not go to nothing with its "
        "tokens: it touches weights and calls kernels, so time gains less than tokens do."
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
)
