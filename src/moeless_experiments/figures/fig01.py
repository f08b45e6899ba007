"""Figure 1: how unequally tokens go to the experts of three layers. Counted, not simulated."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless_experiments.context import Context
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import grid, shades
from moeless_experiments.studies.replay_traces import (
    MIXTRAL,
    PHI,
    Workload,
    demo_workloads,
    open_trace,
    prepare_traces,
    steps_of,
)

_HIGH: Final = 1.5
"""Load of the hottest expert ÷ mean from which skew is called high."""

_SHARE_COLUMNS: Final = ("workload", "routing", "layer", "expert", "share_of_assignments")
_SKEW_COLUMNS: Final = (
    "workload",
    "routing",
    "layers",
    "max_over_mean_mean",
    "max_over_mean_largest",
    "share_of_hottest_quarter",
    "max_over_mean_of_a_batch",
)


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    loads = (
        Workload(MIXTRAL, None, "conversation"),
        Workload(MIXTRAL, None, "code"),
        Workload(PHI, 1.2, "conversation"),
        *demo_workloads(context, "arena"),
        *demo_workloads(context, "sharegpt"),
    )
    prepare_traces(context, loads)
    shares = {load: _shares(open_trace(context, load).trace.loads_NLE) for load in loads}
    skews = {load: _skew(context, load, shares[load]) for load in loads}
    rows = tuple(
        (load.label, _routing(load), layer, expert, float(share_LE[layer, expert]))
        for load, share_LE in shares.items()
        for layer in _three(len(share_LE))
        for expert in range(share_LE.shape[1])
    )
    summary = tuple((load.label, _routing(load), *skews[load]) for load in loads)
    real = [skews[load] for load in loads if load.exponent is None]
    largest = max((skews[load][2], load.label) for load in loads if load.exponent is None)
    return Result(
        provenance="measured",
        tables=(
            Table(name="loads", columns=_SHARE_COLUMNS, rows=rows),
            Table(name="skew", columns=_SKEW_COLUMNS, rows=summary),
        ),
        plots=(
            Plot(
                name="loads",
                draw=lambda figure: _draw(figure, shares),
                inches=(11, 3.0 * -(-len(loads) // 3)),
                caption="Share of a layer's assignments that go to each expert, sorted, in the "
                "first, the middle and the last layer; the dotted line is an equal share.",
            ),
        ),
        findings=(
            Finding(
                what="load of the hottest expert ÷ mean over experts, mean over all layers",
                ours="; ".join(f"{load.label}: {skews[load][1]:.2f}" for load in loads),
                verdict="holds" if min(each[1] for each in real) > _HIGH else "in part",
            ),
            Finding(
                what="share of tokens of the hottest quarter of the experts",
                ours="; ".join(f"{load.label}: {skews[load][3]:.0%}" for load in loads),
            ),
        ),
        interpretation=(
            "Experts are used unequally in every layer that was recorded: over ten minutes the "
            f"hottest has {_span([each[1] for each in real])} times the mean load, averaged over "
            "the layers, "
            f"and {largest[0]:.2f} times in the most unequal layer ({largest[1]}). Within one "
            f"batch it is {_span([each[4] for each in real])} times: what single batches add "
            "comes and goes with them, which is what placement by history cannot follow. "
            "Power-law routing is synthetic, and more skewed than any recording here. Prompts are "
            "Chatbot Arena's, ShareGPT's and "
            "MMLU's in place of LMSYS-Chat-1M; our copy of the paper "
            "has the picture's caption but no number of it."
        ),
        config={
            "workloads": [load.label for load in loads],
            "steps": [steps_of(context, load) for load in loads],
        },
    )


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _routing(load: Workload) -> str:
    return "recorded" if load.exponent is None else "synthetic"


def _three(layers: int) -> Sequence[int]:
    return (0, layers // 2, layers - 1)


def _shares(loads_NLE: NDArray[Any]) -> NDArray[np.float64]:
    total_LE = loads_NLE.sum(axis=0, dtype=np.int64).astype(np.float64)
    shares_LE: NDArray[np.float64] = total_LE / np.maximum(total_LE.sum(axis=1, keepdims=True), 1)
    return shares_LE


def _skew(
    context: Context, load: Workload, share_LE: NDArray[np.float64]
) -> tuple[int, float, float, float, float]:
    experts = share_LE.shape[1]
    over_L = share_LE.max(axis=1) * experts
    hottest_L = np.sort(share_LE, axis=1)[:, -max(experts // 4, 1) :].sum(axis=1)
    loads_NLE = open_trace(context, load).trace.loads_NLE.astype(np.float64)
    mean_NL = loads_NLE.mean(axis=2)
    busy_NL = mean_NL > 0
    batch = float((loads_NLE.max(axis=2)[busy_NL] / mean_NL[busy_NL]).mean())
    return (
        len(share_LE),
        float(over_L.mean()),
        float(over_L.max()),
        float(hottest_L.mean()),
        batch,
    )


def _draw(figure: Any, shares: dict[Workload, NDArray[np.float64]]) -> None:
    panels = grid(figure, len(shares), columns=3)
    for panel, (load, share_LE) in zip(panels, shares.items(), strict=True):
        layers, experts = _three(len(share_LE)), share_LE.shape[1]
        for place, (layer, colour) in enumerate(zip(layers, shades(3), strict=True)):
            panel.bar(
                np.arange(experts) + 0.27 * (place - 1),
                100 * np.sort(share_LE[layer])[::-1],
                0.27,
                color=colour,
                label=f"layer {layer}",
            )
        panel.axhline(100 / experts, linestyle=":", color="black")
        panel.set_title(load.label, fontsize="small")
        panel.set(xlabel="expert, by load", ylabel="% of assignments")
        panel.legend(fontsize="x-small")


EXPERIMENT = Experiment(
    id="fig01",
    title="Loads of experts in three layers",
    claim="Expert popularity is highly skewed, with certain experts receiving disproportionately "
    "higher loads than others.",
    run=run,
)
