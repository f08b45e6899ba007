"""What predictors are worth in the end: straggler ratio and loads against exact knowledge."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.demo_models import chosen_models
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import COLOURS, grid
from moeless_experiments.recordings import available_prompts, tokens_of
from moeless_experiments.studies.forecast_replays import (
    DEVICES,
    Asked,
    Setting,
    replay,
)
from moeless_experiments.studies.forecast_traces import Forecast, make_traces
from moeless_experiments.studies.predictor_bench import DECODING, SMALL_BATCHES, View
from moeless_experiments.studies.predictor_kinds import COPIED, RIDGE
from moeless_experiments.summary import spread

_DEFAULT, _PAPER = "moeless", "paper"
_SETTINGS = [Setting(_DEFAULT, 1.25), Setting(_DEFAULT, 1.5), Setting(_PAPER, 1.5)]
_LARGE, _OWN = "4096x14336", "own"
_CASES = (
    (SMALL_BATCHES, 1, _LARGE),
    (DECODING, 1, _LARGE),
    (SMALL_BATCHES, 3, _LARGE),
    (SMALL_BATCHES, 1, _OWN),
)
"""Steps, distance, and size of the experts. With the demo models' own a layer is over in 0.02 ms,
five times as fast as a plan is made, so that every plan comes a step late, whatever it knew."""

_EXACT, _PREVIOUS = "exact", "previous"
_WITHIN = 0.005
"""Part of the mean straggler ratio by which a prediction may be worse than exact knowledge."""


class _Row(NamedTuple):
    model: str
    trained_on: str
    tested_on: str
    batching: str
    batch: int
    distance: int
    expert_shape: str
    policy: str
    memory_factor: float
    prediction: str
    straggler_ratio_mean: float
    straggler_ratio_p99: float
    loads_per_layer_step: float
    blocking_loads_per_layer_step: float

    @property
    def case(self) -> tuple[Any, ...]:
        """All but the prediction and the figures."""
        return self[:9]


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    prompts = available_prompts(context)
    cases = [
        ((model, prompts[0], prompts[-1]), case)
        for model in chosen_models(context)
        for case in _CASES[: 1 if context.quick else None]
    ]
    make_traces(
        context,
        [
            Forecast(*fitted, distance, name, view)
            for fitted, (view, distance, _) in cases
            for name in (RIDGE, COPIED)
        ],
    )
    rows = [row for fitted, case in cases for row in _replay_case(context, fitted, *case)]
    excess = {name: _excess(rows, _DEFAULT, name) for name in (RIDGE, COPIED, _PREVIOUS)}
    paper = {name: _excess(rows, _PAPER, name) for name in (RIDGE, COPIED, _PREVIOUS)}
    return Result(
        provenance="simulated",
        tables=(Table(name="replays", columns=_Row._fields, rows=tuple(rows)),),
        plots=(Plot(name="straggler_ratio", draw=lambda f: _draw(f, rows), inches=(10, 6)),),
        findings=(
            *(
                Finding(
                    what="mean straggler ratio above that with exact knowledge, default policy, "
                    f"{name}",
                    ours=spread(values, "+.2%"),
                    why=_why(rows, name),
                )
                for name, values in excess.items()
            ),
            *(
                Finding(
                    what=f"the same, the paper's policy, {name}",
                    ours=spread(values, "+.2%"),
                )
                for name, values in paper.items()
            ),
            *(
                Finding(
                    what=f"{what} per layer-step, {label} policy, "
                    f"{', '.join((_EXACT, RIDGE, COPIED, _PREVIOUS))}",
                    ours="; ".join(
                        f"{_mean(rows, policy, name, figure):.4f}"
                        for name in (_EXACT, RIDGE, COPIED, _PREVIOUS)
                    ),
                )
                for policy, label in ((_DEFAULT, "default"), (_PAPER, "the paper's"))
                for what, figure in (
                    ("cold starts", "loads_per_layer_step"),
                    ("loads that tokens wait for", "blocking_loads_per_layer_step"),
                )
            ),
        ),
        interpretation=_interpret(rows),
        config={
            "devices": DEVICES,
            "tokens": tokens_of(context),
            "cost_model": "paper",
            "settings": [f"{each.policy}, {each.memory_factor} x experts" for each in _SETTINGS],
            "steps": [f"{view}, d = {d}, experts {shape}" for view, d, shape in _CASES],
            "fitted_to": prompts[0],
            "replayed": prompts[-1],
        },
    )


def _replay_case(
    context: Context, case: tuple[str, str, str], view: View, distance: int, shape: str
) -> list[_Row]:
    forecasts = {name: Forecast(*case, distance, name, view) for name in (RIDGE, COPIED)}
    made = make_traces(context, forecasts.values())
    traces = {name: made[each] for name, each in forecasts.items()}
    asked = [(RIDGE, "recorded", traces[RIDGE]), (COPIED, "recorded", traces[COPIED])]
    asked += [(name, name, traces[RIDGE]) for name in (_EXACT, _PREVIOUS)]
    labels = {
        Asked(trace, prediction, setting): label
        for label, prediction, trace in asked
        for setting in _SETTINGS
    }
    figures = replay(
        context,
        list(labels),
        distance=distance,
        expert_shape=None if shape == _OWN else shape,
    )
    return [
        _Row(
            *case,
            *view,
            distance,
            shape,
            *each.setting,
            labels[each],
            found["straggler_ratio"]["mean"],
            found["straggler_ratio"]["p99"],
            found["cold_starts_per_layer_step"],
            found["blocking_loads_per_layer_step"],
        )
        for each, found in figures.items()
    ]


def _excess(rows: Sequence[_Row], policy: str, prediction: str) -> list[float]:
    """Case by case: mean straggler ratio ÷ that with exact knowledge, minus 1."""
    exact = {row.case: row.straggler_ratio_mean for row in rows if row.prediction == _EXACT}
    return [
        row.straggler_ratio_mean / exact[row.case] - 1.0
        for row in rows
        if (row.policy, row.prediction) == (policy, prediction)
    ]


def _why(rows: Sequence[_Row], prediction: str) -> str:
    """Cases that are further from exact knowledge than is allowed."""
    exact = {row.case: row.straggler_ratio_mean for row in rows if row.prediction == _EXACT}
    far = [
        f"{row.model}, {row.batching} {row.batch}, d = {row.distance}, experts "
        f"{row.expert_shape}, {row.memory_factor:g} x: {row.straggler_ratio_mean:.3f} against "
        f"{exact[row.case]:.3f}"
        for row in rows
        if (row.policy, row.prediction) == (_DEFAULT, prediction)
        and row.straggler_ratio_mean > exact[row.case] * (1 + _WITHIN)
    ]
    return f"more than {_WITHIN:.1%} in {'; '.join(far)}" if far else ""


def _mean(rows: Sequence[_Row], policy: str, prediction: str, figure: str) -> float:
    found = [
        getattr(row, figure)
        for row in rows
        if (row.policy, row.prediction) == (policy, prediction)
    ]
    return float(np.mean(found))


def _interpret(rows: Sequence[_Row]) -> str:
    own = _excess(rows, _DEFAULT, RIDGE)
    rows = [row for row in rows if row.expert_shape == _LARGE]
    held = sum(value <= _WITHIN for value in own)
    ratio = "straggler_ratio_mean"
    listed = ", ".join(
        f"{name} {_mean(rows, _PAPER, name, 'straggler_ratio_mean'):.3f}"
        for name in (_EXACT, RIDGE, COPIED, _PREVIOUS)
    )
    loads = [_mean(rows, _PAPER, name, "loads_per_layer_step") for name in (_EXACT, RIDGE)]
    better = loads[1] < loads[0] and _mean(rows, _PAPER, RIDGE, ratio) < _mean(
        rows, _PAPER, _EXACT, ratio
    )
    return (
        f"With forecasts of re-fitted gates the default policy is within 0.5% of exact knowledge "
        f"in {held} of {len(own)} cases (mean {np.mean(own):+.2%}): it keeps a standing set of "
        "replicas and splits tokens after the gate has spoken, so a forecast only decides when "
        "the set is changed. The paper's policy follows each forecast; its mean straggler ratio "
        f"is {listed}, with {loads[0]:.2f} loads per layer-step for exact forecasts and "
        f"{loads[1]:.2f} for re-fitted gates"
        + (
            ", which are smoother: knowing more is not always better for a rule that equalises "
            "replicas instead of devices"
            if better
            else ""
        )
        + ". The tokens are of prompts that no predictor was fitted to."
    )


def _draw(figure: Any, rows: Sequence[_Row]) -> None:
    names = {_EXACT: "black", RIDGE: COLOURS["ridge"], COPIED: COLOURS["gate reuse"]}
    names[_PREVIOUS] = "#bbbbbb"
    for panel, setting in zip(
        grid(figure, len(_SETTINGS), columns=len(_SETTINGS), sharey=True), _SETTINGS, strict=True
    ):
        own = [row for row in rows if (row.policy, row.memory_factor) == setting]
        cases = list(dict.fromkeys(row.case for row in own))
        for place, (name, colour) in enumerate(names.items()):
            values = [row.straggler_ratio_mean for row in own if row.prediction == name]
            heights = [0.2 * (place - 1.5) + at for at in range(len(cases))]
            panel.barh(heights, [value - 1 for value in values], 0.2, color=colour, label=name)
        panel.set_yticks(
            range(len(cases)),
            [f"{case[0]}, {case[3]} {case[4]}, d = {case[5]}, {case[6]}" for case in cases],
            fontsize="small",
        )
        panel.set(title=f"{setting.policy}, {setting.memory_factor} x", xlabel="ratio - 1")
    panel.legend(fontsize="small")


EXPERIMENT = Experiment(
    id="end-effect",
    title="Replays with forecasts of real predictors against exact knowledge",
    claim=(
        "Not in the paper: how much balance and how many loads does a prediction cost, compared "
        "with knowing the loads?"
    ),
    run=run,
)
