"""Figure 4: layer time and cost of serverful and serverless systems, side by side."""

from typing import Any

from moeless_experiments.context import Context
from moeless_experiments.figure import Cell, Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import grid
from moeless_experiments.studies.comparison import COLOURS, NAMES, change, compare, cost_change
from moeless_experiments.studies.layer_times import reason, workloads_of
from moeless_experiments.studies.replays import (
    A6000,
    ACCOUNTINGS,
    AUTOMATIC,
    DEFAULT,
    DEVICES,
    PAPER,
    STATIC,
    SYSTEMS,
)


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    workloads = workloads_of(context, "conversation", "arena")
    found = compare(context, workloads, (A6000,))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            load.label,
            NAMES[name],
            change(found, load, A6000, name, STATIC),
            *(cost_change(found, load, A6000, name, STATIC, each) for each in ACCOUNTINGS),
        )
        for load in workloads
        for name in SYSTEMS
    )
    columns = (
        "workload",
        "system",
        "layer_time_change",
        *(f"{a}_cost_change" for a in ACCOUNTINGS),
    )
    table = Table(name="against_static", columns=columns, rows=rows)

    def both(system: str) -> list[bool]:
        return [
            change(found, load, A6000, system, STATIC) < 0
            and cost_change(found, load, A6000, system, STATIC, "paper") < 0
            for load in workloads
        ]

    counts = {name: sum(both(name)) for name in (DEFAULT, AUTOMATIC, PAPER)}
    fair = sum(
        cost_change(found, load, A6000, DEFAULT, STATIC, "resident") < 0 for load in workloads
    )
    return Result(
        provenance="simulated",
        tables=(table,),
        plots=(
            Plot(
                name="time_and_cost",
                draw=lambda figure: _draw(figure, table),
                inches=(12, 4.5),
                caption="Mean layer time (left) and cost by the paper's accounting (right) of "
                "each system, against static parallelism.",
            ),
        ),
        findings=tuple(
            Finding(
                what=f"workloads with lower time and cost (paper's accounting), {NAMES[name]}",
                paper="significantly lower (no number in the text)",
                ours=f"{count} of {len(workloads)}",
                why=""
                if count == len(workloads)
                else "; ".join(
                    f"{load.label}: {reason(found, load, A6000, name, STATIC)}"
                    for load, held in zip(workloads, both(name), strict=True)
                    if not held
                ),
                cases={
                    load.label: f"{change(found, load, A6000, name, STATIC):+.1%} time, "
                    f"{cost_change(found, load, A6000, name, STATIC, 'paper'):+.1%} cost"
                    for load in workloads
                },
                verdict="holds"
                if count == len(workloads)
                else "in part"
                if count
                else "does not hold",
            )
            for name, count in counts.items()
        ),
        interpretation=(
            f"The default is both faster and cheaper by the paper's accounting on "
            f"{counts[DEFAULT]} of {len(workloads)} workloads, the policy as printed on "
            f"{counts[PAPER]}. The gain in time is one of balance and real; that in cost depends "
            f"on the accounting: by what is resident on the devices the default is cheaper on "
            f"{fair} of {len(workloads)}. See fig10."
        ),
        config={"devices": DEVICES, "machine": A6000, "memory_factor": 2.0},
    )


def _draw(figure: Any, table: Table) -> None:
    loads = list(dict.fromkeys(row[0] for row in table.rows))
    titles = {
        "layer_time_change": "mean layer time",
        "paper_cost_change": "cost, paper's accounting",
    }
    for panel, (column, title) in zip(grid(figure, 2, sharey=True), titles.items(), strict=True):
        at = table.columns.index(column)
        for place, system in enumerate(SYSTEMS):
            own = [row for row in table.rows if row[1] == NAMES[system]]
            heights = [n + 0.12 * (place - 3) for n in range(len(loads))]
            values = [1 + float(row[at] or 0) for row in own]
            panel.barh(heights, values, 0.12, color=COLOURS[system], label=NAMES[system])
        panel.set_yticks(range(len(loads)), [str(load) for load in loads], fontsize="x-small")
        panel.set(title=title, xlabel="÷ static's")
    panel.invert_yaxis()
    panel.legend(fontsize="x-small")


EXPERIMENT = Experiment(
    id="fig04",
    title="Layer time and cost, serverful and serverless",
    claim=(
        "The serverless design significantly reduces both MoE layer forward latency and inference "
        "cost over serverful baselines."
    ),
    run=run,
)
