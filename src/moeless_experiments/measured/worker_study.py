"""Layer times of policies on real workers, in turns; and what the simulator says of the same."""

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.config import PolicyConfig
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.engines.transformers.loader import LoadedModel
from moeless.errors import TraceError
from moeless.simulator.forecasts import NoisyForecast
from moeless_experiments.context import Context
from moeless_experiments.measured.calibration import (
    calibration_steps,
    draw_steps,
    fit_linear,
    summarise,
    write_linear,
)
from moeless_experiments.measured.layer_shape import LayerShape, save_random
from moeless_experiments.measured.replaying import MEMORY_FACTOR, SIGMA, replay_shares
from moeless_experiments.measured.workers import (
    DEVICES,
    LayerRunner,
    Sample,
    one_thread,
    start_workers,
)
from moeless_experiments.measured.workload import IdArray, Workload, recorded_workloads

POLICIES: Final = ("static", "eplb", "paper", "moeless")
_VARIED_SEED: Final = 99

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is run.

    Args:
        alternations: Turns of each policy.
        block: Steps of a turn.
        warm_up: Steps before.
        calibration_repeats: Steps of each size and skew that the time model is fitted to.
        calibration_rounds: How often they are run; the first does not count.
        eplb_interval_s: Seconds between plans of EPLB.
        varied: Made-up steps before each workload.
    """

    alternations: int = 12
    block: int = 5
    warm_up: int = 8
    calibration_repeats: int = 2
    calibration_rounds: int = 3
    eplb_interval_s: float = 2.0
    varied: int = 24

    @classmethod
    def of(cls, context: Context) -> "Sizes":
        """Those of a run."""
        if not context.quick:
            return cls()
        return cls(alternations=10, block=2, warm_up=4, calibration_repeats=1, varied=15)


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerTimes:
    """One workload.

    Args:
        workload: Its measured steps, A x B of them.
        cost: What the simulator went by, fitted to other steps.
        seconds: Policy to measured layer times [A, B, L].
        computing: Policy to that part of it that the slowest device computed [A, B, L].
        simulated: Policy to simulated ones of the same steps [A, B, L].
        straggler: Policy to most tokens of a device ÷ mean of all, mean over layer-steps.
    """

    workload: Workload
    cost: LayerCost
    seconds: Mapping[str, FloatArray]
    computing: Mapping[str, FloatArray]
    simulated: Mapping[str, FloatArray]
    straggler: Mapping[str, float]


def study_workers(context: Context) -> list[WorkerTimes]:
    """Measure every workload; made once in a run.

    Raises:
        MoelessError: Recordings cannot be made, or workers do not start.
    """
    return context.share(("measured", "workers"), lambda: _study(context, Sizes.of(context)))


def _study(context: Context, sizes: Sizes) -> list[WorkerTimes]:
    steps = sizes.warm_up + sizes.alternations * sizes.block
    by_shape: dict[LayerShape, list[Workload]] = {}
    for workload in recorded_workloads(context, steps):
        if len(workload.ids) < steps:
            raise TraceError(
                f"{workload.name}: {len(workload.ids)} steps of {steps}; record more tokens, or "
                "leave --shards out"
            )
        by_shape.setdefault(workload.shape, []).append(workload)
    found = []
    for shape, workloads in by_shape.items():
        with tempfile.TemporaryDirectory(prefix="moeless-layers-") as folder, one_thread():
            loaded = save_random(shape, Path(folder), seed=context.seed)
            found += _study_shape(context, sizes, loaded, workloads)
    return found


def _study_shape(
    context: Context, sizes: Sizes, loaded: LoadedModel, workloads: list[Workload]
) -> list[WorkerTimes]:
    with ExitStack() as stack:

        def start(policy: str, cost_model: Path | None = None) -> LayerRunner:
            context.progress(f"{loaded.spec.model_id}: workers of {policy}", 0, 1)
            config = PolicyConfig(
                policy=policy,
                memory_factor=MEMORY_FACTOR,
                eplb_interval_s=sizes.eplb_interval_s,
                cost_model=None if cost_model is None else str(cost_model),
            )
            runtime = stack.enter_context(start_workers(loaded, config))
            return LayerRunner(runtime, seed=context.seed)

        static = start("static")
        cost = _calibrate(context, sizes, static, workloads[0].shape)
        file = loaded.directory / "cost.json"
        write_linear(cost, file, "measured here")
        runners = {"static": static} | {name: start(name, file) for name in POLICIES[1:]}
        samples = [_alternate(context, sizes, runners, workload) for workload in workloads]
    return [
        _summarise(context, sizes, workload, cost, found, loaded.spec.expert)
        for workload, found in zip(workloads, samples, strict=True)
    ]


def _calibrate(
    context: Context, sizes: Sizes, runner: LayerRunner, shape: LayerShape
) -> LayerCost:
    steps = calibration_steps(shape, sizes.calibration_repeats)
    samples: list[list[Sample]] = [[] for _ in range(len(steps) * 2)]
    for round_ in range(sizes.calibration_rounds):
        context.progress(f"{shape.name}: calibration", round_, sizes.calibration_rounds)
        for number, step in enumerate(steps):
            for layer, sample in enumerate(runner.run(number, step)):
                if round_:
                    samples[number * 2 + layer].append(sample)
    return fit_linear(summarise(steps, samples))


def _alternate(
    context: Context, sizes: Sizes, runners: Mapping[str, LayerRunner], workload: Workload
) -> dict[str, list[list[list[Sample]]]]:
    """Turns of every policy on the same steps: policy to [A][B][L]."""
    forecast = NoisyForecast(workload.as_trace().loads_NLE, sigma=SIGMA, seed=context.seed)
    expected_SLE = [forecast.expected_LE(step) for step in range(len(workload.ids))]
    for runner in runners.values():
        runner.heed(expected_SLE)
    numbered = list(enumerate(workload.ids))
    for runner in runners.values():
        _run(runner, [(0, ids_LTK) for ids_LTK in _varied_steps(sizes, workload)])
    # EPLB is to have planned from what it saw, not from nothing.
    settled_s = time.monotonic() + 1.5 * sizes.eplb_interval_s
    turns = 0
    while turns < 2 or time.monotonic() < settled_s:
        for runner in runners.values():
            _run(runner, numbered[: sizes.warm_up])
        turns += 1
    found: dict[str, list[list[list[Sample]]]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(sizes.alternations):
        context.progress(f"{workload.name}: alternation", turn, sizes.alternations)
        first = sizes.warm_up + turn * sizes.block
        # Who comes first changes, so that nobody always follows the same other one.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            # One step that does not count: caches hold what somebody else left there.
            rows = _run(runners[name], numbered[first - 1 : first + sizes.block])
            found[name].append(rows[1:])
    return found


def _varied_steps(sizes: Sizes, workload: Workload) -> list[IdArray]:
    """Made-up steps of the workload's size, for everybody's first calls.

    A product of a number of rows that a process has not had yet takes milliseconds longer, and
    policies differ in how many such numbers they bring about.
    """
    tokens = max(step.shape[1] for step in workload.ids)
    shape = workload.shape
    batches = [tokens] * sizes.varied
    return list(
        draw_steps(batches, shape.experts, shape.top_k, skew=1.0, drift=0.5, seed=_VARIED_SEED)
    )


def _run(runner: LayerRunner, steps: list[tuple[int, IdArray]]) -> list[list[Sample]]:
    return [runner.run(number, ids_LTK) for number, ids_LTK in steps]


def _summarise(
    context: Context,
    sizes: Sizes,
    workload: Workload,
    cost: LayerCost,
    samples: dict[str, list[list[list[Sample]]]],
    expert: ExpertShape,
) -> WorkerTimes:
    trace = workload.as_trace()
    simulated = {}
    for policy in samples:
        context.progress(f"{workload.name}: simulation of {policy}", 0, 1)
        replayed = replay_shares(
            trace, policy, devices=DEVICES, cost=cost, expert=expert, seed=context.seed
        )
        kept_SL = replayed.layer_s_SL[sizes.warm_up :]
        simulated[policy] = kept_SL.reshape(sizes.alternations, sizes.block, -1)
    return WorkerTimes(
        workload=workload,
        cost=cost,
        seconds={policy: _seconds(turns) for policy, turns in samples.items()},
        computing={policy: _computing(turns) for policy, turns in samples.items()},
        simulated=simulated,
        straggler={policy: _straggler(turns) for policy, turns in samples.items()},
    )


def _seconds(turns: list[list[list[Sample]]]) -> FloatArray:
    return np.array([[[sample.seconds for sample in step] for step in turn] for turn in turns])


def _computing(turns: list[list[list[Sample]]]) -> FloatArray:
    return np.array(
        [[[sample.busy_s_D.max() for sample in step] for step in turn] for turn in turns]
    )


def _straggler(turns: list[list[list[Sample]]]) -> float:
    ratios = []
    for turn in turns:
        for step in turn:
            for sample in step:
                tokens_D = sample.share_ED.sum(axis=0)
                ratios.append(float(tokens_D.max() / tokens_D.mean()))
    return float(np.mean(ratios))
