"""Layer times of policies on emulated devices; and what the simulator says of the same."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.engines.transformers.loader import LoadedModel
from moeless_experiments.context import Context
from moeless_experiments.measured.calibration import calibration_steps, fit_devices, summarise
from moeless_experiments.measured.emulation import DeviceEmulator, static_shares
from moeless_experiments.measured.layer_shape import LayerShape, save_random
from moeless_experiments.measured.replaying import Replayed, replay_shares
from moeless_experiments.measured.workers import one_thread
from moeless_experiments.measured.workload import Workload, recorded_workloads

POLICIES: Final = ("static", "eplb", "swift", "paper", "moeless")
DEVICES: Final = 8
_REPEATS: Final = 3
_CALIBRATION_DEVICES: Final = (2, 4, 8)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class EmulatedTimes:
    """One workload.

    Args:
        workload: All its steps; the last N of them were run.
        cost: What the simulator went by, fitted to other steps.
        seconds: Policy to emulated layer times [N, L].
        simulated: Policy to simulated ones of the same steps, with the same shares [N, L].
        blocked: Policy to where tokens waited for a load, which emulation leaves out [N, L].
        straggler: Policy to most tokens of a device ÷ mean of all, mean over layer-steps.
    """

    workload: Workload
    cost: LayerCost
    seconds: Mapping[str, FloatArray]
    simulated: Mapping[str, FloatArray]
    blocked: Mapping[str, NDArray[np.bool_]]
    straggler: Mapping[str, float]


def study_devices(context: Context) -> list[EmulatedTimes]:
    """Emulate every workload.

    Raises:
        MoelessError: Recordings cannot be made, or a policy cannot be run.
    """
    steps, run = (40, 10) if context.quick else (80, 20)
    by_shape: dict[LayerShape, list[Workload]] = {}
    for workload in recorded_workloads(context, steps):
        by_shape.setdefault(workload.shape, []).append(workload)
    found = []
    for shape, workloads in by_shape.items():
        with tempfile.TemporaryDirectory(prefix="moeless-layers-") as folder, one_thread():
            loaded = save_random(shape, Path(folder), seed=context.seed)
            emulator = DeviceEmulator(loaded, seed=context.seed)
            cost = _calibrate(context, emulator, shape)
            found += [_emulate(context, loaded, emulator, cost, each, run) for each in workloads]
    return found


def _calibrate(context: Context, emulator: DeviceEmulator, shape: LayerShape) -> LayerCost:
    # With one expert on each of eight devices nobody can tell what a device costs from what an
    # expert costs, so devices with more experts are fitted, too.
    measured = []
    for devices in _CALIBRATION_DEVICES:
        steps, samples = calibration_steps(shape, 1), []
        shares_NL = static_shares(steps, shape.experts, devices)
        for number, (step, shares) in enumerate(zip(steps, shares_NL, strict=True)):
            context.progress(f"{shape.name}: calibration", number, len(steps))
            for layer, share_ED in enumerate(shares):
                samples.append([emulator.run_best(layer, step[layer], share_ED, _REPEATS)])
        measured.append(summarise(steps, samples))
    return fit_devices(measured)


def _emulate(
    context: Context,
    loaded: LoadedModel,
    emulator: DeviceEmulator,
    cost: LayerCost,
    workload: Workload,
    run: int,
) -> EmulatedTimes:
    trace = workload.as_trace()
    replays: dict[str, Replayed] = {}
    for policy in POLICIES:
        context.progress(f"{workload.name}: decisions of {policy}", 0, 1)
        replays[policy] = replay_shares(
            trace,
            policy,
            devices=DEVICES,
            cost=cost,
            expert=loaded.spec.expert,
            seed=context.seed,
        )
    first = max(len(trace) - run, len(trace) // 2)
    seconds: dict[str, list[list[float]]] = {policy: [] for policy in POLICIES}
    for step in range(first, len(trace)):
        context.progress(f"{workload.name}: emulation", step - first, len(trace) - first)
        ids_LTK = workload.ids[step]
        # All policies on one step before the next, so that a change of pace is everybody's; each
        # is first in turn, so that none always finds the caches as another one leaves them.
        for policy in POLICIES[step % len(POLICIES) :] + POLICIES[: step % len(POLICIES)]:
            shares = replays[policy].share_SLED[step]
            row = [
                emulator.run_best(layer, ids_TK, shares[layer], _REPEATS)
                for layer, ids_TK in enumerate(ids_LTK)
            ]
            seconds[policy].append([sample.seconds for sample in row])
    return EmulatedTimes(
        workload=workload,
        cost=cost,
        seconds={policy: np.array(rows) for policy, rows in seconds.items()},
        simulated={policy: each.layer_s_SL[first:] for policy, each in replays.items()},
        blocked={policy: each.blocked_SL[first:] for policy, each in replays.items()},
        straggler={
            policy: _straggler(each.share_SLED[first:]) for policy, each in replays.items()
        },
    )


def _straggler(share_SLED: NDArray[np.int64]) -> float:
    tokens_SLD = share_SLED.sum(axis=2)
    return float((tokens_SLD.max(axis=2) / tokens_SLD.mean(axis=2)).mean())
