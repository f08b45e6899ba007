"""What a predictor is worth in the end: a trace with its forecasts, replayed under policies."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.predictor_trace import apply_predictor
from moeless.bootstrap.replay import ReplayTask, prepare_replay
from moeless.bootstrap.replay_runner import metrics_config, run_replay
from moeless.simulator.metrics import measure_policy
from moeless_experiments.context import Context
from moeless_experiments.recordings import open_recording
from moeless_experiments.studies.predictor_bench import View
from moeless_experiments.studies.predictor_kinds import keep_predictor

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


def replay(
    context: Context,
    trace: Path,
    prediction: str,
    settings: list[Setting],
    *,
    distance: int,
    expert_shape: str | None,
) -> Mapping[Setting, dict[str, Any]]:
    """Figures of policies on a trace.

    Args:
        context: Gives seed and processes.
        trace: With forecasts, if they are what is used.
        prediction: ``recorded``, ``exact`` and so on.
        settings: Policies.
        distance: d.
        expert_shape: Size of the experts for the time model and the links, such as
            ``4096x14336``; None takes the model's own.

    Raises:
        MoelessError: A policy cannot be run.
    """
    figures: dict[Setting, dict[str, Any]] = {}
    for factor in sorted({setting.memory_factor for setting in settings}):
        policies = tuple(s.policy for s in settings if s.memory_factor == factor)
        prepared = prepare_replay(
            ReplayTask(
                routing=trace,
                policies=policies,
                devices=DEVICES,
                prediction=prediction,
                distance=distance if prediction == "exact" else None,
                expert_shape=expert_shape,
                seed=context.seed,
                options=PolicyOptions(memory_factor=factor),
            )
        )
        recordings = run_replay(
            prepared,
            jobs=context.threads,
            progress=partial(_tell, context, f"{trace.stem}, {prediction}", len(prepared.trace)),
        )
        for policy, recording in recordings.items():
            figures[Setting(policy, factor)] = measure_policy(
                recording, prepared.trace.loads_NLE, config=metrics_config(prepared, policy)
            )
    return figures


def _tell(context: Context, what: str, steps: int, policy: str, done: int) -> None:
    context.progress(f"{what}: {policy}", done, steps)
