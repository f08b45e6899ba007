"""Systems beside each other on several workloads: rows, reductions, distributions."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.figure import Cell, Plot, Table
from moeless_experiments.plotting import grid
from moeless_experiments.studies.replay_traces import Workload
from moeless_experiments.studies.replays import (
    ACCOUNTINGS,
    HARDWARE,
    SYSTEMS,
    Case,
    Outcome,
    replay_all,
)

NAMES: Final = {
    "static": "Megatron-LM (static)",
    "eplb": "EPLB",
    "swift": "swift",
    "paper": "MoEless as printed",
    "moeless": "MoEless default",
    "moeless-auto": "MoEless (automatic memory)",
    "oracle": "Oracle (lossy)",
}
COLOURS: Final = {
    "static": "#7f7f7f",
    "eplb": "#ff7f0e",
    "swift": "#9467bd",
    "paper": "#2ca02c",
    "moeless": "#1f77b4",
    "moeless-auto": "#17becf",
    "oracle": "black",
}
MAIN_COLUMNS: Final = (
    "workload",
    "routing",
    "devices",
    "system",
    "layer_time_mean_ms",
    "layer_time_p50_ms",
    "layer_time_p99_ms",
    "straggler_ratio_mean",
    "straggler_ratio_p99",
    "replicas_per_layer",
    "memory_factor",
    "cold_starts_per_layer_step",
    "blocking_loads_per_layer_step",
    *(f"cost_{name}_gb_s" for name in ACCOUNTINGS),
)

Found = dict[Case, Outcome]


def compare(context: Context, workloads: Sequence[Workload], hardware: Iterable[str]) -> Found:
    """All systems on each workload and machine."""
    return replay_all(
        context,
        [
            Case(load, name, machine)
            for load in workloads
            for machine in hardware
            for name in SYSTEMS
        ],
    )


def main_table(name: str, found: Found) -> Table:
    """A row for each case."""
    return Table(
        name=name, columns=MAIN_COLUMNS, rows=tuple(_row(*each) for each in found.items())
    )


def cdf_table(name: str, found: Found, points: int = 41) -> Table:
    """The distribution of layer times by percentile."""
    shares = np.linspace(0, 100, points)
    rows: list[tuple[Cell, ...]] = []
    for case, outcome in found.items():
        values = np.percentile(outcome.layer_ms, shares)
        rows += [
            (case.workload.label, HARDWARE[case.hardware], system_of(case), float(p), float(v))
            for p, v in zip(shares, values, strict=True)
        ]
    columns = ("workload", "devices", "system", "percentile", "layer_time_ms")
    return Table(name=name, columns=columns, rows=tuple(rows))


def system_of(case: Case) -> str:
    """A system's name, and what it lacks."""
    return NAMES[case.policy] + (f", {case.without}" if case.without else "")


def settings_of(found: Found) -> list[tuple[Workload, str]]:
    """Workloads and machines, in order."""
    return list(dict.fromkeys((case.workload, case.hardware) for case in found))


def change(found: Found, workload: Workload, hardware: str, ours: str, theirs: str) -> float:
    """Mean layer time of one system ÷ another's, minus 1."""
    pair = [found[Case(workload, name, hardware)].mean_ms for name in (ours, theirs)]
    return pair[0] / pair[1] - 1.0


def cost_change(
    found: Found, workload: Workload, hardware: str, ours: str, theirs: str, accounting: str
) -> float:
    """Cost of one system ÷ another's, minus 1."""
    pair = [found[Case(workload, name, hardware)].cost[accounting] for name in (ours, theirs)]
    return pair[0] / pair[1] - 1.0


def cdf_plot(name: str, found: Found, caption: str) -> Plot:
    """A panel of distributions for each workload and machine."""
    settings = settings_of(found)
    rows = -(-len(settings) // 3)
    return Plot(
        name=name,
        draw=lambda figure: _draw_cdfs(figure, found, settings),
        inches=(12, 3.2 * rows),
        vector=False,
        caption=caption,
    )


def _draw_cdfs(figure: Any, found: Found, settings: Sequence[tuple[Workload, str]]) -> None:
    panels = grid(figure, len(settings), columns=3)
    for panel, (workload, hardware) in zip(panels, settings, strict=True):
        for case, outcome in found.items():
            if (case.workload, case.hardware) != (workload, hardware):
                continue
            values = np.sort(outcome.layer_ms)
            style = "--" if case.without else "-"
            panel.plot(
                values,
                np.linspace(0, 1, len(values)),
                style,
                color=COLOURS[case.policy],
                label=system_of(case),
                linewidth=1.2,
            )
        panel.set_title(f"{workload.label}\n{HARDWARE[hardware]}", fontsize="small")
        panel.set(xlabel="layer time (ms)", ylabel="share of layer-steps")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="x-small")


def _row(case: Case, outcome: Outcome) -> tuple[Cell, ...]:
    figures = outcome.figures
    time, ratio = figures["layer_forward_ms"], figures["straggler_ratio"]
    return (
        case.workload.label,
        "recorded" if case.workload.exponent is None else "synthetic",
        HARDWARE[case.hardware],
        system_of(case),
        time["mean"],
        time["p50"],
        time["p99"],
        ratio["mean"],
        ratio["p99"],
        outcome.replicas,
        figures["memory_factor"],
        figures["cold_starts_per_layer_step"],
        figures["blocking_loads_per_layer_step"],
        *(outcome.cost[name] for name in ACCOUNTINGS),
    )
