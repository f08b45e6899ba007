"""Trains what several figures ask for: each predictor once in a run, several at a time."""

from collections.abc import Iterable
from typing import NamedTuple

from moeless_experiments.context import Context, here
from moeless_experiments.processes import Job
from moeless_experiments.recordings import record_all
from moeless_experiments.studies.predictor_kinds import (
    FINETUNE,
    MLP,
    is_kept,
    keep_predictor,
    trained_as,
)

_LONGEST = (MLP, FINETUNE)


class Wanted(NamedTuple):
    """A predictor.

    Args:
        model: Demo model.
        prompts: What it is fitted to.
        distance: d.
        name: Kind.
    """

    model: str
    prompts: str
    distance: int
    name: str


def train_all(context: Context, wanted: Iterable[Wanted]) -> None:
    """Train and keep what is not there yet.

    Args:
        context: Says where, how much to train, and in how many processes.
        wanted: Predictors; those whose kind is not trained are left out.

    Raises:
        MoelessError: A recording is damaged or too small, or the cache cannot be written.
    """
    wanted = list(wanted)
    record_all(context, [(each.model, each.prompts) for each in wanted])
    missing = list(
        dict.fromkeys(
            each._replace(name=trained_as(each.name))
            for each in wanted
            if not is_kept(context, *each)
        )
    )
    missing.sort(key=lambda each: -each.name.startswith(_LONGEST))
    jobs = [
        Job(
            f"{each.model}, {each.prompts}, d = {each.distance}: {each.name}",
            (context.settled(), each),
        )
        for each in missing
    ]
    context.compute("training", _train, jobs)


def _train(job: tuple[Context, Wanted]) -> None:
    context, wanted = job
    keep_predictor(here(context), *wanted)
