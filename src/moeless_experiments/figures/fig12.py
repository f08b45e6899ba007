"""Figure 12: predicted against actual expert loads, and how well they correlate."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeless.learned.evaluation import Loads
from moeless_experiments.context import Context
from moeless_experiments.demo_models import chosen_models
from moeless_experiments.figure import Cell, Experiment, Finding, Plot, Result, Table, Verdict
from moeless_experiments.plotting import grid
from moeless_experiments.recordings import available_prompts, tokens_of
from moeless_experiments.studies.predictor_answers import Question, ask_all
from moeless_experiments.studies.predictor_bench import LONG_PROMPTS, SMALL_BATCHES
from moeless_experiments.studies.predictor_kinds import GATE, RIDGE
from moeless_experiments.summary import spread

_DISTANCE = 1
_NAMES = (GATE, RIDGE)
_VIEWS = (LONG_PROMPTS, SMALL_BATCHES)


class _Case(NamedTuple):
    model: str
    prompts: str
    name: str
    expected_NLE: Loads
    actual_NLE: Loads


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    rows: list[tuple[Cell, ...]] = []
    shown: list[_Case] = []
    answers = ask_all(
        context,
        [
            Question(model, prompts, prompts, _DISTANCE, name)
            for model in chosen_models(context)
            for prompts in available_prompts(context)
            for name in _NAMES
        ],
    )
    for model in chosen_models(context):
        for prompts in available_prompts(context):
            for view in _VIEWS:
                for name in _NAMES:
                    question = Question(model, prompts, prompts, _DISTANCE, name)
                    expected_NLE, actual_NLE = answers[question].loads[view]
                    by_layer = [
                        correlate(expected_NLE[:, layer], actual_NLE[:, layer])
                        for layer in range(expected_NLE.shape[1])
                    ]
                    overall = correlate(expected_NLE, actual_NLE)
                    least, median = float(np.min(by_layer)), float(np.median(by_layer))
                    cells = (overall, least, median, len(actual_NLE))
                    rows.append((model, prompts, *view, name, *cells))
                    if view == LONG_PROMPTS and prompts == available_prompts(context)[0]:
                        shown.append(_Case(model, prompts, name, expected_NLE, actual_NLE))
    ours = [case for case in shown if case.name == RIDGE]
    return Result(
        provenance="measured",
        tables=(
            Table(
                name="correlation",
                columns=(
                    "model",
                    "prompts",
                    "batching",
                    "batch",
                    "predictor",
                    "pearson_r",
                    "least_r_of_a_layer",
                    "median_r_of_a_layer",
                    "batches",
                ),
                rows=tuple(rows),
            ),
            *(Table(name=f"pairs_{c.model}", columns=_PAIRS, rows=_pairs(c)) for c in ours),
        ),
        plots=(
            Plot(
                name="predicted_actual",
                draw=lambda f: _draw_pairs(f, shown),
                inches=(3.2 * len(ours), 6.4),
                vector=False,
            ),
            Plot(
                name="layers_experts",
                draw=lambda f: _draw_loads(f, ours),
                inches=(9, 3.2 * len(ours)),
                vector=False,
            ),
        ),
        findings=tuple(
            Finding(
                what=f"Pearson r of predicted and actual loads, {name}, d = {_DISTANCE}",
                paper="strong positive correlation (no number in the text)",
                ours=spread(
                    (float(row[5] or 0.0) for row in rows if row[2:5] == (*LONG_PROMPTS, name)),
                    ".3f",
                ),
                cases={
                    f"{row[0]}, {row[1]}": f"{row[5]:.3f}"
                    for row in rows
                    if row[2:5] == (*LONG_PROMPTS, name)
                },
                verdict=_verdict(rows, name),
            )
            for name in reversed(_NAMES)
        ),
        interpretation=_interpret(rows),
        config={
            "distance": _DISTANCE,
            "tokens": tokens_of(context),
            "batches": [str(view) for view in _VIEWS],
            "loads": "tokens per expert ÷ mean of the layer's experts",
        },
    )


_PAIRS = ("layer", "expert", "predicted", "actual")


def correlate(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Pearson's r over all entries; 0 where one does not vary.

    Args:
        expected: Predicted loads.
        actual: True loads, same shape.
    """
    first, second = expected.ravel() - expected.mean(), actual.ravel() - actual.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale > 0.0 else 0.0


def _pairs(case: _Case) -> tuple[tuple[Cell, ...], ...]:
    """Mean load of each expert of each predicted layer, relative to the layer's mean."""
    expected_LE, actual_LE = (
        loads.mean(axis=0) / loads.mean(axis=(0, 2))[:, None]
        for loads in (case.expected_NLE, case.actual_NLE)
    )
    return tuple(
        (
            layer + _DISTANCE,
            expert,
            round(float(expected_LE[layer, expert]), 3),
            round(float(actual_LE[layer, expert]), 3),
        )
        for layer in range(expected_LE.shape[0])
        for expert in range(expected_LE.shape[1])
    )


def _verdict(rows: list[tuple[Cell, ...]], name: str) -> Verdict:
    """Strong is 0.8 and more."""
    found = [float(row[5] or 0.0) for row in rows if row[2:5] == (*LONG_PROMPTS, name)]
    strong = [r >= 0.8 for r in found]
    return "holds" if all(strong) else "in part" if any(strong) else "does not hold"


def _interpret(rows: list[tuple[Cell, ...]]) -> str:
    found = {
        (view, name): [float(row[5] or 0.0) for row in rows if row[2:5] == (*view, name)]
        for view in _VIEWS
        for name in _NAMES
    }
    parts = [
        f"{np.mean(found[view, RIDGE]):.3f} re-fitted against {np.mean(found[view, GATE]):.3f} "
        f"copied in batches of {view.size} tokens ({view.batching})"
        for view in _VIEWS
    ]
    return (
        f"Predicted and actual loads of all (batch, layer, expert) correlate strongly, as the "
        f"paper says: on average {'; '.join(parts)}. The correlation says that it is known which "
        "experts are busy; by how much is a question for the error of the maximum load, see "
        "the experiment predictors."
    )


def _draw_pairs(figure: Any, cases: list[_Case]) -> None:
    ordered = [case for name in _NAMES for case in cases if case.name == name]
    for panel, case in zip(
        grid(figure, len(ordered), columns=len(ordered) // len(_NAMES)), ordered, strict=True
    ):
        expected, actual = (
            (loads / loads.mean(axis=2, keepdims=True)).ravel()
            for loads in (case.expected_NLE, case.actual_NLE)
        )
        limit = float(np.quantile(np.concatenate([expected, actual]), 0.999))
        panel.hist2d(
            actual, expected, bins=60, range=[[0, limit], [0, limit]], cmin=1, cmap="viridis"
        )
        panel.plot([0, limit], [0, limit], color="black", linewidth=0.7)
        r = correlate(case.expected_NLE, case.actual_NLE)
        panel.set_title(f"{case.model}, {case.name}\nr = {r:.3f}", fontsize="medium")
        panel.set(xlabel="actual load ÷ mean", ylabel="predicted")


def _draw_loads(figure: Any, cases: list[_Case]) -> None:
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for row, case in zip(panels, cases, strict=True):
        means = [
            (loads.mean(axis=0) / loads.mean(axis=(0, 2))[:, None]).T
            for loads in (case.expected_NLE, case.actual_NLE)
        ]
        top = max(mean.max() for mean in means)
        for panel, mean_EL, title in zip(row, means, ("predicted", "actual"), strict=True):
            drawn = panel.imshow(mean_EL, aspect="auto", vmin=0, vmax=top, cmap="magma")
            panel.set(title=f"{case.model}, {title}", xlabel="MoE layer", ylabel="expert")
            ticks = range(0, mean_EL.shape[1], 5)
            panel.set_xticks(ticks, [str(tick + _DISTANCE) for tick in ticks])
        figure.colorbar(drawn, ax=list(row), label="load ÷ mean")


EXPERIMENT = Experiment(
    id="fig12",
    title="Predicted against actual expert loads",
    claim="Predicted and actual expert loads correlate strongly across all layers (Pearson).",
    run=run,
)
