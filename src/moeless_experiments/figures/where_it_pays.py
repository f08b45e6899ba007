"""Our own: a map of where serverless experts pay, by skew and by size of the batch."""

from typing import Any, Final

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import grid
from moeless_experiments.studies.replay_traces import PHI, Workload, open_trace, steps_of
from moeless_experiments.studies.replays import (
    A6000_READING,
    DEFAULT,
    EPLB,
    H200,
    HARDWARE,
    STATIC,
    Case,
    Outcome,
    replay_all,
)

_PAYS: Final = 0.02
"""Part of the layer time that a system must save to be called worth while."""

_COLUMNS: Final = (
    "model",
    "devices",
    "phase",
    "requests_per_batch",
    "tokens_per_batch",
    "exponent",
    "static_straggler_ratio",
    "default_against_static",
    "default_against_eplb",
    "resident_against_static",
    "resident_against_eplb",
    "pays",
)

_Phase = tuple[str, int]


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    exponents = (0.0, 0.6, 1.2) if context.quick else (0.0, 0.4, 0.8, 1.2)
    phases: tuple[_Phase, ...] = (
        (("decode", 8), ("decode", 128), ("prefill", 8))
        if context.quick
        else (("decode", 1), ("decode", 16), ("decode", 128), ("prefill", 2), ("prefill", 16))
    )
    machines = (H200,) if context.quick else (A6000_READING, H200)
    places = [
        (_workload(phase, exponent), machine)
        for machine in machines
        for phase in phases
        for exponent in exponents
    ]
    found = replay_all(
        context,
        [
            Case(load, name, machine)
            for load, machine in places
            for name in (STATIC, EPLB, DEFAULT)
        ],
    )
    rows = tuple(_row(context, load, machine, found) for load, machine in places)
    table = Table(name="map", columns=_COLUMNS, rows=rows)
    pays = [row for row in rows if row[-1] == "layer time"]
    not_ = [row for row in rows if row[-1] != "layer time"]
    against_eplb = [row for row in rows if row[8] < -_PAYS]
    lines = [
        f"{machine}, {phase} of {size}: {_threshold(rows, machine, phase, size)}"
        for machine in (HARDWARE[name] for name in machines)
        for phase, size in phases
    ]
    return Result(
        provenance="simulated",
        tables=(table,),
        plots=(
            Plot(
                name="map",
                draw=lambda figure: _draw(figure, table, machines, phases, exponents),
                inches=(10, 3.6 * len(machines)),
                caption="Change of the mean layer time of the default in percent, against static "
                "parallelism and against EPLB, by skew of routing and size of the batch.",
            ),
        ),
        findings=(
            Finding(
                what=f"cells in which the default saves more than {_PAYS:.0%} of static's layer "
                "time",
                ours=f"{len(pays)} of {len(rows)}; against EPLB {len(against_eplb)}",
            ),
            Finding(what="least exponent at which it pays against static", ours="; ".join(lines)),
        ),
        interpretation=(
            f"The default saves more than {_PAYS:.0%} of the layer time of static parallelism in "
            f"{len(pays)} of {len(rows)} cells of the map, and of EPLB's in {len(against_eplb)}. "
            + (
                "Where it does not pay, the static straggler ratio is "
                f"{min(row[6] for row in not_):.2f} to {max(row[6] for row in not_):.2f} with "
                f"{min(row[4] for row in not_):.0f} to {max(row[4] for row in not_):.0f} tokens "
                "in a batch: either nothing is skewed, or a layer's time is that of reading "
                "weights, which no spreading of tokens shortens. "
                if not_
                else ""
            )
            + "What is paid for it is memory on the devices: over all cells the default's "
            f"resident cost is {_span([row[9] for row in rows])} of static's and "
            f"{_span([row[10] for row in rows])} of EPLB's. With steady traffic the gain is time; "
            "memory is only saved when traffic pauses for longer than the keep-alive. Routing "
            "here is synthetic, with each layer's popularity fixed, which is kind to EPLB."
        ),
        config={
            "model": PHI,
            "exponents": list(exponents),
            "batches": [f"{phase} {size}" for phase, size in phases],
            "steps": [steps_of(context, _workload(phase, 0.0)) for phase in phases],
            "pays_from": _PAYS,
        },
    )


def _workload(phase: _Phase, exponent: float) -> Workload:
    kind, size = phase
    if kind == "decode":
        return Workload(PHI, exponent, phase="decode", batch=size)
    return Workload(PHI, exponent, batch=size)


def _row(
    context: Context, load: Workload, machine: str, found: dict[Case, Outcome]
) -> tuple[Any, ...]:
    static, eplb, own = (found[Case(load, name, machine)] for name in (STATIC, EPLB, DEFAULT))
    time = own.mean_ms / static.mean_ms - 1
    return (
        load.model,
        HARDWARE[machine],
        load.phase,
        load.batch,
        float(open_trace(context, load).trace.tokens_N.mean()),
        load.exponent,
        static.straggler_ratio,
        time,
        own.mean_ms / eplb.mean_ms - 1,
        own.cost["resident"] / static.cost["resident"] - 1,
        own.cost["resident"] / eplb.cost["resident"] - 1,
        "layer time" if time < -_PAYS else "no",
    )


def _threshold(rows: tuple[tuple[Any, ...], ...], machine: str, phase: str, size: int) -> str:
    own = [
        row[5] for row in rows if row[1:4] == (machine, phase, size) and row[-1] == "layer time"
    ]
    return f"{min(own):g}" if own else "never"


def _span(values: list[float]) -> str:
    low, high = f"{1 + min(values):.0%}", f"{1 + max(values):.0%}"
    return low if low == high else f"{low} to {high}"


def _draw(
    figure: Any,
    table: Table,
    machines: tuple[str, ...],
    phases: tuple[_Phase, ...],
    exponents: tuple[float, ...],
) -> None:
    panels = grid(figure, 2 * len(machines), columns=2)
    for place, panel in enumerate(panels):
        machine, column = HARDWARE[machines[place // 2]], 7 + place % 2
        cells = [
            [
                100 * float(row[column] or 0.0)
                for exponent in exponents
                for row in table.rows
                if row[1:4] == (machine, *phase) and row[5] == exponent
            ]
            for phase in phases
        ]
        panel.imshow(cells, cmap="RdBu", vmin=-70, vmax=70, aspect="auto")
        for y, line in enumerate(cells):
            for x, value in enumerate(line):
                panel.text(x, y, f"{value:+.0f}", ha="center", va="center", fontsize="small")
        panel.set_xticks(range(len(exponents)), [f"{x:g}" for x in exponents])
        panel.set_yticks(range(len(phases)), [f"{kind} {size}" for kind, size in phases])
        panel.set_title(
            f"{machine}, against {'static' if column == 7 else 'EPLB'}", fontsize="small"
        )
        panel.set(xlabel="exponent of power-law routing")


EXPERIMENT = Experiment(
    id="where-it-pays",
    title="Where serverless experts pay, and where they do not",
    claim="Not in the paper: for which skew and batch size does the default policy save time?",
    run=run,
)
