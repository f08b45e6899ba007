"""Routing traces of tokens that a predictor has not seen, with what it expects of them."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from moeless.bootstrap.predictors.predictor_trace import apply_predictor
from moeless_experiments.context import Context, here
from moeless_experiments.processes import Job
from moeless_experiments.recordings import open_recording, record_all
from moeless_experiments.studies.predictor_bench import View
from moeless_experiments.studies.predictor_kinds import keep_predictor
from moeless_experiments.studies.predictor_training import Wanted, train_all


class Forecast(NamedTuple):
    """A trace with forecasts.

    Args:
        model: Demo model.
        trained_on: Prompts that the predictor is fitted to.
        tested_on: Prompts of the trace.
        distance: d.
        name: A kind of predictor that is trained.
        view: How tokens become steps.
    """

    model: str
    trained_on: str
    tested_on: str
    distance: int
    name: str
    view: View

    @property
    def label(self) -> str:
        """For progress and errors, and the trace's file."""
        return (
            f"{self.model}-{self.trained_on}-{self.tested_on}-{self.distance}-"
            f"{self.view.batching}-{self.view.size}-{self.name.replace(' ', '_')}"
        )


def make_trace(context: Context, forecast: Forecast) -> Path:
    """Make one trace, or give the one that was made before in this run.

    Args:
        context: Says where traces are kept during the run.
        forecast: Which.

    Raises:
        MoelessError: The recording is damaged or too small.
    """
    return make_traces(context, [forecast])[forecast]


def make_traces(context: Context, wanted: Iterable[Forecast]) -> dict[Forecast, Path]:
    """Make traces, several at a time.

    Args:
        context: Says where traces are kept during the run.
        wanted: Which.

    Raises:
        MoelessError: A recording is damaged or too small.
    """
    folder = context.share(
        ("traces",), lambda: tempfile.TemporaryDirectory(prefix="moeless-traces-")
    )
    paths = {each: Path(folder.name) / f"{each.label}.npz" for each in wanted}
    missing = [each for each, path in paths.items() if not path.exists()]
    record_all(context, [(each.model, each.tested_on) for each in missing])
    train_all(
        context,
        [Wanted(each.model, each.trained_on, each.distance, each.name) for each in missing],
    )
    jobs = [Job(each.label, (context.settled(), each, paths[each])) for each in missing]
    context.compute("forecasts", _make, jobs)
    return paths


def _make(job: tuple[Context, Forecast, Path]) -> None:
    context, (model, trained_on, tested_on, distance, name, view), path = job
    context = here(context)
    apply_predictor(
        keep_predictor(context, model, trained_on, distance, name),
        open_recording(context, model, tested_on),
        path,
        batch=view.size,
        batching=view.batching,
    )
