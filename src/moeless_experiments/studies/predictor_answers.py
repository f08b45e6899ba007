"""What predictors are worth on held-out tokens: asked once in a run, several at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from moeless.learned.evaluation import Loads
from moeless.learned.metrics import LoadScores
from moeless_experiments.context import Context, here
from moeless_experiments.processes import Job
from moeless_experiments.recordings import open_recording, record_all
from moeless_experiments.studies.predictor_bench import (
    ADJUSTED,
    HISTORIES,
    LONG_PROMPTS,
    SMALL_BATCHES,
    VIEWS,
    PredictorBench,
    View,
    evaluate,
)
from moeless_experiments.studies.predictor_kinds import GATE, LOOKING_AHEAD, RIDGE, is_possible
from moeless_experiments.studies.predictor_training import Wanted, train_all

_SHOWN: Final = (GATE, RIDGE)
"""Whose loads are drawn one by one."""


class Question(NamedTuple):
    """A predictor, and the tokens that it is asked about.

    Args:
        model: Demo model.
        trained_on: Prompts that the predictor is fitted to.
        tested_on: Prompts of the held-out tokens.
        distance: d.
        name: Kind of predictor.
    """

    model: str
    trained_on: str
    tested_on: str
    distance: int
    name: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a predictor is worth.

    Args:
        layers: Predicted layers.
        scores: Figures over all layers, by the way tokens are put together; None where there is
            no batch.
        layer_scores: The same of each predicted layer, long prompts.
        recall: Mean per-token top-k recall over predicted layers; None where tokens have none.
        num_bytes: Of the predictor; None for those that only look back.
        layers_trained: Layers with another model than the copied gate, where that means something.
        fit_tokens: Tokens that it was fitted to, where that means something.
        loads: Expected and true loads [N, L, E] of two ways of putting tokens together, for
            predictors that are drawn.
    """

    layers: range
    scores: dict[View, LoadScores | None]
    layer_scores: dict[int, LoadScores | None]
    recall: float | None
    num_bytes: int | None
    layers_trained: int | None
    fit_tokens: int | None
    loads: dict[View, tuple[Loads, Loads]]

    @property
    def on_long_prompts(self) -> LoadScores:
        """Figures in the batches by which predictors are compared."""
        scores = self.scores[LONG_PROMPTS]
        assert scores is not None
        return scores


def names_of(context: Context, model: str, trained_on: str, tested_on: str) -> tuple[str, ...]:
    """All predictors that can be asked; some read what not every recording has."""
    record_all(context, [(model, trained_on), (model, tested_on)])
    recordings = [open_recording(context, model, each) for each in (trained_on, tested_on)]
    ahead = (
        name for name in LOOKING_AHEAD if all(is_possible(shards, name) for shards in recordings)
    )
    return (*ahead, *ADJUSTED, *HISTORIES)


def ask_all(context: Context, questions: Iterable[Question]) -> dict[Question, Answer]:
    """Ask what was not asked yet in this run.

    Args:
        context: Says how many tokens, and in how many processes.
        questions: What to ask.

    Raises:
        MoelessError: A recording is damaged or too small.
    """
    questions = list(dict.fromkeys(questions))
    done: dict[Question, Answer] = context.share(("answers",), dict)
    missing = [each for each in questions if each not in done]
    record_all(context, [(each.model, each.tested_on) for each in missing])
    train_all(
        context,
        [
            Wanted(each.model, each.trained_on, each.distance, _asked_of(each.name))
            for each in missing
        ],
    )
    # Tokens are put together once for all who are asked about them.
    groups: dict[tuple[str, str, int], list[Question]] = {}
    for each in missing:
        groups.setdefault((each.model, each.tested_on, each.distance), []).append(each)
    jobs = [
        Job(f"{model}, {prompts}, d = {distance}", (context.settled(), group))
        for (model, prompts, distance), group in groups.items()
    ]
    for found in context.compute("asking", _answer, jobs):
        done.update(found)
    return {each: done[each] for each in questions}


def _asked_of(name: str) -> str:
    return RIDGE if name in ADJUSTED else name


def _answer(job: tuple[Context, list[Question]]) -> dict[Question, Answer]:
    context, group = here(job[0]), job[1]
    model, _, tested_on, distance, _ = group[0]
    evaluations = evaluate(context, open_recording(context, model, tested_on), distance)
    benches: dict[str, PredictorBench] = {}
    answers = {}
    for each in group:
        if each.trained_on not in benches:
            benches[each.trained_on] = PredictorBench(
                context, each.model, each.trained_on, distance, evaluations
            )
        answers[each] = _ask(benches[each.trained_on], each.name)
    return answers


def _ask(bench: PredictorBench, name: str) -> Answer:
    expected = bench.ask(name)
    made = expected.made
    return Answer(
        layers=bench.layers,
        scores={view: bench.scores(name, view) for view in VIEWS},
        layer_scores=bench.layer_scores(name, LONG_PROMPTS),
        recall=expected.recall,
        num_bytes=None if made is None else made.num_bytes,
        layers_trained=None if made is None else made.layers_trained,
        fit_tokens=None if made is None else made.fit_tokens,
        loads={view: bench.loads(name, view) for view in (LONG_PROMPTS, SMALL_BATCHES)}
        if name in _SHOWN
        else {},
    )
