"""Our own: what prediction errors, devices, batches, links and keep-alive change."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import grid
from moeless_experiments.studies.comparison import COLOURS, NAMES
from moeless_experiments.studies.replay_traces import (
    MIXTRAL_RECORDED,
    steps_of,
)
from moeless_experiments.studies.replays import (
    A6000_READING,
    DEFAULT,
    EPLB,
    HARDWARE,
    PAPER,
    STATIC,
    Case,
    Outcome,
    replay_all,
)
from moeless_experiments.summary import span

_SYSTEMS: Final = (STATIC, EPLB, PAPER, DEFAULT)
_FORECASTING: Final = (PAPER, DEFAULT)
_CODE: Final = MIXTRAL_RECORDED._replace(arrivals="code")
_SAME: Final = 0.002
"""Part of the mean by which rounding differs."""

COLUMNS: Final = (
    "swept",
    "value",
    "workload",
    "devices",
    "system",
    "layer_time_mean_ms",
    "layer_time_p99_ms",
    "straggler_ratio_mean",
    "replicas_per_layer",
    "cold_starts_per_layer_step",
    "blocking_loads_per_layer_step",
    "cost_resident_gb_s",
)


class _Sweep(NamedTuple):
    name: str
    unit: str
    cases: tuple[tuple[float, Case], ...]


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    sweeps = _sweeps(context)
    found = replay_all(context, [case for sweep in sweeps for _, case in sweep.cases])
    rows = tuple(
        _row(sweep, value, case, found[case]) for sweep in sweeps for value, case in sweep.cases
    )
    findings = tuple(_finding(sweep, found) for sweep in sweeps)
    return Result(
        provenance="simulated",
        tables=(Table(name="sensitivity", columns=COLUMNS, rows=rows),),
        plots=(
            Plot(
                name="sensitivity",
                draw=lambda figure: _draw(figure, sweeps, found),
                inches=(11, 6.4),
                caption="Mean layer time of each system ÷ that of the default policy at the same "
                "setting, or, where only policies that look ahead are swept, in milliseconds.",
            ),
        ),
        findings=findings,
        interpretation=_interpret(sweeps, found),
        config={
            "sweeps": {
                sweep.name: sorted({value for value, _ in sweep.cases}) for sweep in sweeps
            },
            "steps": steps_of(context, MIXTRAL_RECORDED),
        },
    )


def _sweeps(context: Context) -> tuple[_Sweep, ...]:
    def chosen(quick: Iterable[float], full: Iterable[float]) -> tuple[float, ...]:
        return tuple(quick if context.quick else full)

    base = MIXTRAL_RECORDED
    return (
        _Sweep(
            "prediction error",
            "sigma",
            tuple(
                (sigma, Case(base, name, prediction=f"noisy:{sigma:g}" if sigma else "exact"))
                for sigma in chosen((0.0, 0.12, 0.5), (0.0, 0.06, 0.12, 0.25, 0.5, 1.0))
                for name in _FORECASTING
            ),
        ),
        _Sweep(
            "device count",
            "devices",
            tuple(
                (devices, Case(base, name, devices=int(devices)))
                for devices in chosen((4, 8), (2, 4, 8, 16))
                for name in _SYSTEMS
            ),
        ),
        _Sweep(
            "prefill batch",
            "requests",
            tuple(
                (size, Case(base._replace(batch=int(size)), name, A6000_READING))
                for size in chosen((1, 8), (1, 2, 4, 8, 16, 32))
                for name in _SYSTEMS
            ),
        ),
        _Sweep(
            "decode batch",
            "requests",
            tuple(
                (size, Case(base._replace(phase="decode", batch=int(size)), name, A6000_READING))
                for size in chosen((1, 64), (1, 4, 16, 64, 256))
                for name in _SYSTEMS
            ),
        ),
        _Sweep(
            "link speed",
            "times the preset",
            tuple(
                (speed, Case(base, name, link=speed))
                for speed in chosen((0.1, 1.0), (0.1, 0.25, 0.5, 1.0, 2.0, 4.0))
                for name in _FORECASTING
            ),
        ),
        _Sweep(
            "keep-alive",
            "seconds",
            tuple(
                (seconds, Case(_CODE, name, keep_alive_s=seconds))
                for seconds in chosen((1.0, 300.0), (1.0, 2.0, 5.0, 30.0, 300.0))
                for name in _FORECASTING
            ),
        ),
    )


def _row(sweep: _Sweep, value: float, case: Case, outcome: Outcome) -> tuple[Any, ...]:
    figures = outcome.figures
    return (
        f"{sweep.name} ({sweep.unit})",
        value,
        case.workload.label,
        HARDWARE[case.hardware],
        NAMES[case.policy],
        outcome.mean_ms,
        outcome.p99_ms,
        outcome.straggler_ratio,
        outcome.replicas,
        figures["cold_starts_per_layer_step"],
        figures["blocking_loads_per_layer_step"],
        outcome.cost["resident"],
    )


def _values(sweep: _Sweep, policy: str, found: dict[Case, Outcome]) -> dict[float, Outcome]:
    return {value: found[case] for value, case in sweep.cases if case.policy == policy}


def _finding(sweep: _Sweep, found: dict[Case, Outcome]) -> Finding:
    cases: dict[str, str] = {}
    moved: list[str] = []
    own = _values(sweep, DEFAULT, found)
    if any(case.policy == STATIC for _, case in sweep.cases):
        what = f"mean layer time of the default by {sweep.name} ({sweep.unit})"
        for other in (STATIC, EPLB, PAPER):
            theirs = _values(sweep, other, found)
            changes = [own[value].mean_ms / theirs[value].mean_ms - 1 for value in own]
            moved.append(f"against {NAMES[other]} {span(changes, '+.1%')}")
            listed = ", ".join(
                f"{value:g}: {own[value].mean_ms / theirs[value].mean_ms - 1:+.1%}"
                for value in own
            )
            cases[f"against {NAMES[other]}"] = listed
    else:
        what = f"mean layer time by {sweep.name} ({sweep.unit}), ms; waited-for loads"
        for policy in _FORECASTING:
            listed = ", ".join(
                f"{value:g}: {each.mean_ms:.3f} ms, "
                f"{each.figures['blocking_loads_per_layer_step']:.3f}"
                for value, each in _values(sweep, policy, found).items()
            )
            cases[NAMES[policy]] = listed
            times = [each.mean_ms for each in _values(sweep, policy, found).values()]
            moved.append(f"{NAMES[policy]} {span(times, '.3f')}")
    return Finding(what=what, ours="; ".join(moved), cases=cases)


def _interpret(sweeps: tuple[_Sweep, ...], found: dict[Case, Outcome]) -> str:
    text = []
    for sweep in sweeps:
        own = _values(sweep, DEFAULT, found)
        first, last = min(own), max(own)
        ours = own[last].mean_ms / own[first].mean_ms - 1
        if any(case.policy == STATIC for _, case in sweep.cases):
            static = _values(sweep, STATIC, found)
            gains = {value: own[value].mean_ms / static[value].mean_ms - 1 for value in own}
            text.append(
                f"By {sweep.name} the default changes the mean layer time against static "
                f"parallelism by {gains[first]:+.1%} at {first:g} and {gains[last]:+.1%} at "
                f"{last:g} {sweep.unit}."
            )
        else:
            printed = _values(sweep, PAPER, found)
            theirs = printed[last].mean_ms / printed[first].mean_ms - 1
            text.append(
                f"From {first:g} to {last:g} ({sweep.name}, {sweep.unit}) the default's mean "
                f"layer time changes by {ours:+.1%}, that of the policy as printed by "
                f"{theirs:+.1%}."
            )
    slower = [
        f"{sweep.name} {value:g}"
        for sweep in sweeps
        if any(case.policy == STATIC for _, case in sweep.cases)
        for value, own in _values(sweep, DEFAULT, found).items()
        if own.mean_ms > _values(sweep, STATIC, found)[value].mean_ms * (1 + _SAME)
    ]
    text.append(
        "At no setting is the default slower than static parallelism."
        if not slower
        else f"It is slower than static parallelism at {', '.join(slower)}."
    )
    text.append(_compare_dependence(sweeps, found))
    text.append("Batches of the decode sweep are drawn from recorded frequencies.")
    return " ".join(text)


def _compare_dependence(sweeps: tuple[_Sweep, ...], found: dict[Case, Outcome]) -> str:
    """How much prediction errors move each of those who look ahead."""
    errors = next(sweep for sweep in sweeps if sweep.name == "prediction error")
    moved = {}
    for policy in _FORECASTING:
        times = [each.mean_ms for each in _values(errors, policy, found).values()]
        moved[policy] = max(times) / min(times) - 1.0
    less, more = sorted(moved, key=lambda policy: moved[policy])
    text = (
        f"Prediction errors move the mean layer time of {NAMES[less]} by {moved[less]:.2%} at the "
        f"most, that of {NAMES[more]} by {moved[more]:.2%}"
    )
    if less == DEFAULT:
        text += ": token shares of the former are decided after the gate has spoken"
    return f"{text}."


def _draw(figure: Any, sweeps: tuple[_Sweep, ...], found: dict[Case, Outcome]) -> None:
    for panel, sweep in zip(grid(figure, len(sweeps), columns=3), sweeps, strict=True):
        policies = list(dict.fromkeys(case.policy for _, case in sweep.cases))
        own = _values(sweep, DEFAULT, found)
        relative = STATIC in policies
        for policy in policies:
            values = _values(sweep, policy, found)
            heights = [
                each.mean_ms / (own[value].mean_ms if relative else 1.0)
                for value, each in values.items()
            ]
            panel.plot(list(values), heights, ".-", color=COLOURS[policy], label=NAMES[policy])
        panel.set_title(sweep.name, fontsize="small")
        panel.set(xlabel=sweep.unit, ylabel="÷ default" if relative else "ms")
        if min(own) > 0:
            panel.set_xscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")


EXPERIMENT = Experiment(
    id="sensitivity",
    title="Prediction errors, devices, batches, links, keep-alive",
    claim="Not in the paper: how do layer times change with prediction error, device count, batch "
    "size, link speed and keep-alive?",
    run=run,
)
