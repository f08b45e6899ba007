"""What a predictor is worth in the end: a trace with its forecasts, replayed under policies."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.predictor_trace import apply_predictor
from moeless.bootstrap.replay import ReplayTask, prepare_replay
from moeless.bootstrap.replay_process import replay_job
from moeless.bootstrap.replay_runner import describe_job, metrics_config
from moeless.simulator.metrics import measure_policy
from moeless_experiments.context import Context
from moeless_experiments.recordings import open_recording
from moeless_experiments.studies.predictor_bench import View
from moeless_experiments.studies.predictor_kinds import keep_predictor
from moeless_experiments.studies.replay_processes import replay_pool

DEVICES = 8


class Setting(NamedTuple):
    """A policy and the memory that it may take.

    Args:
        policy: By name.
        memory_factor: Replicas ÷ experts, at most.
    """

    policy: str
    memory_factor: float


def make_trace(
    context: Context, case: tuple[str, str, str], distance: int, name: str, view: View
) -> Path:
    """A routing trace of tokens that a predictor has not seen, with what it expects.

    Args:
        context: Says where traces are kept during the run.
        case: Demo model, prompts that the predictor is fitted to, and prompts of the trace.
        distance: d.
        name: A kind of predictor that is trained.
        view: How tokens become steps.

    Raises:
        MoelessError: The recording is damaged or too small.
    """
    model, trained_on, tested_on = case
    predictor = keep_predictor(context, model, trained_on, distance, name)
    folder = context.share(
        ("traces",), lambda: tempfile.TemporaryDirectory(prefix="moeless-traces-")
    )
    label = f"{model}-{trained_on}-{tested_on}-{distance}-{view.batching}-{view.size}"
    path = Path(folder.name) / f"{label}-{name.replace(' ', '_')}.npz"
    apply_predictor(
        predictor,
        open_recording(context, model, tested_on),
        path,
        batch=view.size,
        batching=view.batching,
        on_progress=lambda done, total: context.progress(f"{label}: forecasts", done, total),
    )
    return path


class Asked(NamedTuple):
    """A trace that is replayed with a prediction.

    Args:
        trace: With forecasts, if they are what is used.
        prediction: ``recorded``, ``exact`` and so on.
        setting: The policy, and its memory.
    """

    trace: Path
    prediction: str
    setting: Setting


def replay(
    context: Context, asked: Sequence[Asked], *, distance: int, expert_shape: str | None
) -> dict[Asked, dict[str, Any]]:
    """Figures of policies on traces.

    Args:
        context: Gives seed and processes.
        asked: What is replayed.
        distance: d.
        expert_shape: Size of the experts for the time model and the links, such as
            ``4096x14336``; None takes the model's own.

    Raises:
        MoelessError: A policy cannot be run.
    """
    jobs = [(each, distance, expert_shape, context.seed) for each in asked]
    run = map if context.threads < 2 else replay_pool(context).map
    figures: dict[Asked, dict[str, Any]] = {}
    for each, found in zip(asked, run(_replay, jobs), strict=True):
        what = f"{each.trace.stem}, {each.prediction}: {each.setting.policy}"
        context.progress(what, len(figures) + 1, len(jobs))
        figures[each] = found
    return figures


def _replay(job: tuple[Asked, int, str | None, int]) -> dict[str, Any]:
    (trace, prediction, setting), distance, expert_shape, seed = job
    prepared = prepare_replay(
        ReplayTask(
            routing=trace,
            policies=(setting.policy,),
            devices=DEVICES,
            prediction=prediction,
            distance=distance if prediction == "exact" else None,
            expert_shape=expert_shape,
            seed=seed,
            options=PolicyOptions(memory_factor=setting.memory_factor),
        )
    )
    recording = replay_job(
        describe_job(prepared, setting.policy), prepared.trace, on_step=lambda _step: None
    )
    config = metrics_config(prepared, setting.policy)
    return measure_policy(recording, prepared.trace.loads_NLE, config=config)
