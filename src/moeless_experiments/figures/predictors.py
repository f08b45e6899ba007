"""All predictors, all figures of merit: which experts will be hot, and by how much."""

from typing import Any

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.demo_models import chosen_models
from moeless_experiments.figure import Cell, Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import grid
from moeless_experiments.recordings import available_prompts, tokens_of
from moeless_experiments.studies.predictor_answers import (
    Answer,
    Question,
    ask_all,
    names_of,
)
from moeless_experiments.studies.predictor_bench import (
    ADJUSTED,
    DECODING,
    HISTORIES,
    LONG_PROMPTS,
    VIEWS,
)
from moeless_experiments.studies.predictor_kinds import (
    FINETUNE,
    FINETUNE_80,
    FINETUNE_95,
    GATE,
    MEAN,
    MLP,
    ONLINE,
    RIDGE,
    RIDGE_80,
    RIDGE_95,
)

_DISTANCES, _QUICK_DISTANCES = (1, 2, 3, 4, 5), (1, 3)
_FIGURES = (
    "load_accuracy",
    "error_p90",
    "hot_hit_rate",
    "max_load_error",
    "pearson_r",
)
_COLUMNS = (
    "model",
    "trained_on",
    "tested_on",
    "distance",
    "predictor",
    "batching",
    "batch",
    "batches",
    *_FIGURES,
    "token_recall",
    "layers_trained",
    "bytes",
)
_GATE_GAIN = {1: 5.0, 3: 8.0, 4: 8.0, 5: 8.0}
"""Points of accuracy above copied gates that are asked for, by distance."""


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    distances = _QUICK_DISTANCES if context.quick else _DISTANCES
    prompts = available_prompts(context)
    rows: list[tuple[Cell, ...]] = []
    by_layer: list[tuple[Cell, ...]] = []
    questions = [
        Question(model, trained_on, tested_on, distance, name)
        for model in chosen_models(context)
        for distance in distances
        for trained_on, tested_on in _pairs(context, prompts)
        for name in _asked(context, (model, trained_on, tested_on), prompts[0])
    ]
    answers = ask_all(context, questions)
    for asked, answer in answers.items():
        rows += _rows(asked, answer)
        if asked.trained_on == prompts[0]:
            by_layer.append(_layer_row(asked, answer))
    depth = max(answer.layers.stop for answer in answers.values())
    table = Table(name="figures", columns=_COLUMNS, rows=tuple(rows))
    wide = max(len(row) for row in by_layer)
    return Result(
        provenance="measured",
        tables=(
            table,
            Table(
                name="load_accuracy_by_layer",
                columns=(
                    *_COLUMNS[:5],
                    *(f"layer_{layer}" for layer in range(wide - 5)),
                ),
                rows=tuple((*row, *[None] * (wide - len(row))) for row in by_layer),
            ),
        ),
        plots=(
            Plot(name="figures_of_merit", draw=lambda f: _draw(f, table, prompts), inches=(10, 7)),
        ),
        findings=_findings(table, distances),
        interpretation=_interpret(table, distances),
        config={
            "distances": list(distances),
            "tokens": tokens_of(context),
            "views": [str(view) for view in VIEWS],
            "depth": depth,
        },
    )


def _pairs(context: Context, prompts: tuple[str, ...]) -> list[tuple[str, str]]:
    """What is fitted to and what is asked about: the first source tells of all, others of them."""
    same = [] if context.quick else [(other, other) for other in prompts[1:]]
    return [(prompts[0], tested_on) for tested_on in prompts] + same


def _asked(context: Context, case: tuple[str, str, str], first: str) -> list[str]:
    """What descends or is fitted anew each time is slow, and is fitted to one source only."""
    names = names_of(context, *case)
    if case[1] == first:
        return list(names)
    slow = (MLP, FINETUNE, FINETUNE_80, FINETUNE_95, ONLINE)
    return [name for name in names if name not in slow]


def _rows(asked: Question, answer: Answer) -> list[tuple[Cell, ...]]:
    rows = []
    for view, scores in answer.scores.items():
        if scores is None:
            continue
        rows.append(
            (
                *asked,
                *view,
                scores.batches,
                *(round(getattr(scores, figure), 4) for figure in _FIGURES),
                None if answer.recall is None else round(answer.recall, 4),
                answer.layers_trained,
                answer.num_bytes,
            )
        )
    return rows


def _layer_row(asked: Question, answer: Answer) -> tuple[Cell, ...]:
    values = (
        None if scores is None else round(scores.load_accuracy, 3)
        for scores in answer.layer_scores.values()
    )
    return (*asked, *[None] * asked.distance, *values)


def _mean(table: Table, name: str, figure: str, **wanted: Cell) -> float:
    """Mean over the rows of a predictor in batches of long prompts, or as wanted."""
    wanted = {"batching": LONG_PROMPTS.batching, "batch": LONG_PROMPTS.size, **wanted}
    wanted["predictor"] = name
    places = {table.columns.index(key): value for key, value in wanted.items()}
    place = table.columns.index(figure)
    found = [
        float(row[place] or 0.0)
        for row in table.rows
        if all(row[at] == value for at, value in places.items())
    ]
    return float(np.mean(found)) if found else float("nan")


def _gain(table: Table, name: str, distance: int) -> float:
    """Points of accuracy above copied gates."""
    accuracy = (_mean(table, each, "load_accuracy", distance=distance) for each in (name, GATE))
    return 100 * (next(accuracy) - next(accuracy))


def _findings(table: Table, distances: tuple[int, ...]) -> tuple[Finding, ...]:
    findings = []
    for name in (RIDGE, RIDGE_80, RIDGE_95, FINETUNE_80, FINETUNE_95):
        parts = [f"d = {d}: {_gain(table, name, d):.1f}" for d in distances]
        findings.append(
            Finding(what=f"points that {name} gains over copied gates", ours="; ".join(parts))
        )
    models = dict.fromkeys(table.column("model"))
    findings += [_finding_of_model(table, str(model)) for model in models]
    for figure in ("hot_hit_rate", "max_load_error", "pearson_r"):
        parts = [
            f"{name} {_mean(table, name, figure, distance=1):.3f}"
            for name in (GATE, RIDGE, *HISTORIES)
        ]
        findings.append(Finding(what=f"{figure}, d = 1", ours="; ".join(parts)))
    return tuple(findings)


def _finding_of_model(table: Table, model: str) -> Finding:
    """How much there is to gain for a model, and how much is gained."""
    names = (GATE, MEAN, RIDGE, MLP)
    values = {name: _mean(table, name, "load_accuracy", distance=1, model=model) for name in names}
    gained, missing = values[RIDGE] - values[GATE], 1 - values[GATE]
    return Finding(
        what=f"points that {RIDGE} gains over copied gates at d = 1, of those missing, {model}",
        ours=f"{100 * gained:.1f} of {100 * missing:.1f} ({gained / missing:.0%})",
        cases={name: f"{value:.3f}" for name, value in values.items()},
    )


def _interpret(table: Table, distances: tuple[int, ...]) -> str:
    missed = [
        f"d = {d}: {_gain(table, RIDGE, d):.1f} of {_GATE_GAIN[d]:.0f}"
        for d in distances
        if d in _GATE_GAIN and _gain(table, RIDGE, d) < _GATE_GAIN[d]
    ]
    wanted = "A gain of 5 points over copied gates at d = 1 and 8 from d = 3 on is " + (
        f"missed at {'; '.join(missed)}" if missed else "reached on average"
    )
    decode = {"batching": DECODING.batching, "batch": DECODING.size, "distance": 1}
    decoding = {
        name: _mean(table, name, "load_accuracy", **decode)
        for name in (GATE, RIDGE, *ADJUSTED, *HISTORIES)
    }
    listed = ", ".join(
        f"{name} {value:.3f}" for name, value in decoding.items() if not np.isnan(value)
    )
    return (
        f"{wanted}: a copied gate has no more than "
        f"{100 * (1 - _mean(table, GATE, 'load_accuracy', distance=1)):.1f} points to lose at "
        f"d = 1. Load accuracy flatters: a constant mean load reaches "
        f"{_mean(table, 'mean load', 'load_accuracy', distance=1):.3f}, but knows the hottest "
        f"expert in {_mean(table, 'mean load', 'hot_hit_rate', distance=1):.0%} of the batches, "
        f"against {_mean(table, RIDGE, 'hot_hit_rate', distance=1):.0%} for re-fitted gates. In "
        f"decoding of {DECODING.size} conversations at d = 1: {listed or 'too few tokens'}."
    )


def _draw(figure: Any, table: Table, prompts: tuple[str, ...]) -> None:
    del prompts
    names = [name for name in dict.fromkeys(table.column("predictor")) if isinstance(name, str)]
    figures = ("load_accuracy", "hot_hit_rate", "max_load_error", "pearson_r")
    titles = ("load accuracy", "hottest expert known", "error of maximum load", "Pearson r")
    for panel, name, title in zip(grid(figure, 4, sharey=True), figures, titles, strict=True):
        values = [_mean(table, each, name, distance=1) for each in names]
        panel.barh(range(len(names)), values, color="#1f77b4")
        panel.set_yticks(range(len(names)), names, fontsize="small")
        panel.set_title(f"{title}, d = 1, {LONG_PROMPTS}", fontsize="medium")
        panel.grid(alpha=0.3, axis="x")
        if name in ("load_accuracy", "pearson_r"):
            panel.set_xlim(max(0.0, np.nanmin(values) - 0.05), 1)
    panel.invert_yaxis()


EXPERIMENT = Experiment(
    id="predictors",
    title="Every predictor by every figure of merit",
    claim=(
        "Not in the paper: which predictor knows the hot experts, and how much of it is due to "
        "looking ahead rather than back?"
    ),
    run=run,
)
