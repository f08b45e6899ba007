"""How predictors get better with tokens to learn from: where large ones from scratch catch up."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from moeless_experiments.context import Context
from moeless_experiments.demo_models import chosen_models
from moeless_experiments.figure import Experiment, Finding, Plot, Result, Table
from moeless_experiments.plotting import COLOURS, grid
from moeless_experiments.recordings import available_prompts
from moeless_experiments.studies.predictor_answers import Answer, Question, ask_all
from moeless_experiments.studies.predictor_bench import LONG_PROMPTS
from moeless_experiments.studies.predictor_kinds import (
    FINETUNE,
    GATE,
    MLP,
    RIDGE,
    of_tokens,
)

_TOKENS, _QUICK_TOKENS = (512, 1024, 2048, 4096), (512, 1024)
_TRAINED: Final = (RIDGE, FINETUNE, MLP)
_DISTANCE: Final = 1
_PAPER_POINTS: Final = 15.0


class _Point(NamedTuple):
    model: str
    distance: int
    predictor: str
    most_tokens: int | None
    fit_tokens: int
    load_accuracy: float
    hot_hit_rate: float
    token_recall: float


def run(context: Context) -> Result:
    """See ``EXPERIMENT``."""
    prompts = available_prompts(context)[0]
    counts = _QUICK_TOKENS if context.quick else _TOKENS
    asked = {
        Question(model, prompts, prompts, _DISTANCE, _kind(name, most)): (name, most)
        for model in chosen_models(context)
        for name in _TRAINED
        for most in (*counts, None)
    }
    gates = {
        model: Question(model, prompts, prompts, _DISTANCE, GATE)
        for model in chosen_models(context)
    }
    answers = ask_all(context, [*asked, *gates.values()])
    points = [_point(each.model, *told, answers[each]) for each, told in asked.items()]
    copied = {model: answers[each].on_long_prompts.load_accuracy for model, each in gates.items()}
    return Result(
        provenance="measured",
        tables=(Table(name="accuracy", columns=_Point._fields, rows=tuple(points)),),
        plots=(
            Plot(
                name="accuracy",
                draw=lambda figure: _draw(figure, points, copied),
                inches=(9, 6),
                caption="Mean load accuracy on conversations that were not fitted to, by tokens "
                "fitted to; a panel for each model. Dotted: copied gates, which learn nothing.",
            ),
        ),
        findings=tuple(_finding(points, model) for model in chosen_models(context)),
        interpretation=_interpret(points, copied),
        config={
            "distance": _DISTANCE,
            "fitted_to": prompts,
            "batches": str(LONG_PROMPTS),
            "most_tokens": [*counts, "all that a recording has"],
        },
    )


def _kind(name: str, most: int | None) -> str:
    return name if most is None else of_tokens(name, most)


def _point(model: str, name: str, most: int | None, answer: Answer) -> _Point:
    scores = answer.on_long_prompts
    assert answer.recall is not None
    return _Point(
        model,
        _DISTANCE,
        name,
        most,
        answer.fit_tokens or 0,
        scores.load_accuracy,
        scores.hot_hit_rate,
        answer.recall,
    )


def _curve(points: Sequence[_Point], model: str, name: str) -> dict[int, float]:
    """Accuracy by tokens fitted to."""
    return {
        p.fit_tokens: p.load_accuracy for p in points if (p.model, p.predictor) == (model, name)
    }


def _ahead(points: Sequence[_Point], model: str) -> dict[int, float]:
    """Points that re-fitted gates are ahead of perceptrons, by tokens fitted to."""
    refitted, perceptron = (_curve(points, model, name) for name in (RIDGE, MLP))
    return {count: 100 * (refitted[count] - perceptron[count]) for count in refitted}


def _finding(points: Sequence[_Point], model: str) -> Finding:
    ahead = _ahead(points, model)
    return Finding(
        what=f"points of {RIDGE} above {MLP} by tokens fitted to, {model}, d = {_DISTANCE}",
        paper=f"up to {_PAPER_POINTS:.0f}%, tokens not given",
        ours="; ".join(f"{count:,}: {points:.1f}" for count, points in ahead.items()),
    )


def _interpret(points: Sequence[_Point], copied: dict[str, float]) -> str:
    models = list(copied)
    ahead = {model: _ahead(points, model) for model in models}
    least = min(min(each) for each in ahead.values())
    first = [next(iter(each.values())) for each in ahead.values()]
    last = [list(each.values())[-1] for each in ahead.values()]
    last_count = max(max(each) for each in ahead.values())
    reached = {
        model: [count for count, value in each.items() if value >= _PAPER_POINTS]
        for model, each in ahead.items()
    }
    shown = ", ".join(f"{model} up to {max(found):,}" for model, found in reached.items() if found)
    where = (
        f"The paper's {_PAPER_POINTS:.0f} points are reached with few tokens only ({shown})"
        if shown
        else f"The paper's {_PAPER_POINTS:.0f} points are reached nowhere"
    )
    below = [
        f"{model} {', '.join(f'{count:,}' for count in counts)}"
        for model in models
        if (
            counts := [
                count
                for count, value in _curve(points, model, MLP).items()
                if value < copied[model]
            ]
        )
    ]
    worse = (
        f"Perceptrons are below copied gates with {'; '.join(below)} tokens. "
        if below
        else "Perceptrons are above copied gates with all of these. "
    )
    return (
        f"Perceptrons from scratch need tokens, re-fitted gates hardly any: with {least:,} they "
        f"are {min(first):.1f} to {max(first):.1f} points behind, by model, with "
        f"{last_count:,} {min(last):.1f} to {max(last):.1f}. {worse}{where}: no predictor can "
        "lose more than its load accuracy lies below one, and with every token choosing several "
        f"of few experts even copied gates have {min(copied.values()):.3f} to "
        f"{max(copied.values()):.3f}. So how far a predictor is ahead of one from scratch says "
        "how little the latter had to learn from."
    )


def _draw(figure: Any, points: Sequence[_Point], copied: dict[str, float]) -> None:
    for panel, (model, level) in zip(grid(figure, len(copied)), copied.items(), strict=True):
        for name in _TRAINED:
            curve = _curve(points, model, name)
            panel.plot(list(curve), list(curve.values()), ".-", color=COLOURS[name], label=name)
        panel.axhline(level, color=COLOURS[GATE], linestyle=":", label=GATE)
        panel.set_xscale("log", base=2)
        ticks = sorted(np.unique([p.fit_tokens for p in points if p.model == model]).tolist())
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize="small")
        panel.set(title=model, xlabel="tokens fitted to", ylabel="mean load accuracy")
        panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


EXPERIMENT = Experiment(
    id="learning-curve",
    title="Load accuracy by the number of tokens to learn from",
    claim=(
        "Not in the paper: by how much are re-fitted gates ahead of large predictors from scratch "
        "(up to 15% there), depending on the tokens that both learn from?"
    ),
    run=run,
)
