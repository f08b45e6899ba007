"""What a predictor is worth in the end: a trace with its forecasts, replayed under policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.replays.replay import ReplayTask, prepare_replay
from moeless.bootstrap.replays.replay_process import replay_job
from moeless.bootstrap.replays.replay_runner import describe_job, metrics_config
from moeless.simulator.metrics import measure_policy
from moeless_experiments.context import Context
from moeless_experiments.processes import Job

DEVICES = 8


class Setting(NamedTuple):
    """A policy and the memory that it may take.

    Args:
        policy: By name.
        memory_factor: Replicas ÷ experts, at most.
    """

    policy: str
    memory_factor: float


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
    jobs = [
        Job(
            f"{each.trace.stem}, {each.prediction}: {each.setting.policy}",
            (each, distance, expert_shape, context.seed),
        )
        for each in asked
    ]
    return dict(zip(asked, context.compute("replaying", _replay, jobs), strict=True))


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
