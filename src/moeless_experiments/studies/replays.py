"""Replays that figures share: each is done once in a run, and kept for the next one.

A replay is simulated and depends on nothing but its case, the trace, the seed and the code, so the
same figures come out whenever these are the same. Durations of real decisions are left out here.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import moeless
from moeless.bootstrap.policies import ORACLE, PolicyOptions, is_serverful, max_replicas
from moeless.bootstrap.replays.replay import PreparedReplay, ReplayTask, prepare_replay
from moeless.bootstrap.replays.replay_process import replay_job
from moeless.bootstrap.replays.replay_runner import describe_job, metrics_config
from moeless.core.whole_file import written_whole
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import build_forecast
from moeless.simulator.metrics import measure_policy
from moeless.simulator.recording import Recording, num_warm_up_steps
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless_experiments.context import Context
from moeless_experiments.processes import Job
from moeless_experiments.studies.replay_traces import (
    StudyTrace,
    Workload,
    open_trace,
    prepare_traces,
)
from moeless_experiments.studies.replay_variants import WHOLE, build_variant

DEVICES: Final = 8
STATIC, EPLB, SWIFT, PAPER, DEFAULT = "static", "eplb", "swift", "paper", "moeless"
AUTOMATIC: Final = "moeless-auto"
"""The default policy when nobody says how much memory to take, as ``moeless serve`` runs it."""
SYSTEMS: Final = (STATIC, EPLB, SWIFT, PAPER, DEFAULT, AUTOMATIC, ORACLE)
ACCOUNTINGS: Final = ("billed", "resident", "reserved", "paper")

A6000, A6000_READING, H200 = "paper", "a6000", "h200"
HARDWARE: Final = {
    A6000: "A6000, the paper's time model",
    A6000_READING: "A6000, weights are read",
    H200: "H200",
}
"""Time models by name; each comes with its device's memory and links."""

_CHANGING = ("plan_us", "split_us", "search")
"""Figures that a clock decides."""

_LONGEST: Final = {PAPER: 3, DEFAULT: 2, AUTOMATIC: 2, SWIFT: 1}
"""Replays that take long, which begin first, so that none of them is left at the end."""

_CODE = ("policies", "simulator", "costs", "control", "functions", "core", "workloads")


class Case(NamedTuple):
    """One policy on one workload and machine.

    Args:
        workload: What is replayed.
        policy: By name, or ``AUTOMATIC``.
        hardware: Time model by name.
        without: What the policy lacks, see ``replay_variants``.
        memory_factor: Replicas ÷ experts, at most; 0 lets the default policy choose.
        prediction: As ``--prediction``.
        distance: d.
        cv_threshold: V.
        devices: D.
        keep_alive_s: How long idle instances stay.
        link: Speed of the host links, 1 for the preset's.
    """

    workload: Workload
    policy: str
    hardware: str = A6000
    without: str = WHOLE
    memory_factor: float = 2.0
    prediction: str = "noisy:0.12"
    distance: int = 1
    cv_threshold: float = 0.2
    devices: int = DEVICES
    keep_alive_s: float = 300.0
    link: float = 1.0

    @property
    def name(self) -> str:
        """For progress and errors."""
        without = f" {self.without}" if self.without else ""
        return f"{self.policy}{without}, {self.workload.label}, {self.hardware}"

    @property
    def resolved(self) -> "Case":
        """The same with the name of a policy."""
        if self.policy != AUTOMATIC:
            return self
        return self._replace(policy=DEFAULT, memory_factor=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What came out of a case.

    Args:
        figures: As ``moeless replay`` gives them, without real durations.
        layer_ms: Time of each layer-step that had tokens, in milliseconds [N].
    """

    figures: dict[str, Any]
    layer_ms: NDArray[np.float64]

    @property
    def mean_ms(self) -> float:
        """Mean time of a layer."""
        return float(self.figures["layer_forward_ms"]["mean"])

    @property
    def p99_ms(self) -> float:
        """99th percentile of the time of a layer."""
        return float(self.figures["layer_forward_ms"]["p99"])

    @property
    def straggler_ratio(self) -> float:
        """Mean of max device tokens ÷ the least possible."""
        return float(self.figures["straggler_ratio"]["mean"])

    @property
    def replicas(self) -> float:
        """Mean warm replicas of a layer."""
        return float(self.figures["replicas_per_layer"]["mean"])

    @property
    def cost(self) -> dict[str, float]:
        """GB·s by accounting."""
        found: dict[str, float] = self.figures["gb_s"]
        return found


def replay_all(context: Context, cases: Iterable[Case]) -> dict[Case, Outcome]:
    """Replay what was not replayed yet, several at a time.

    Args:
        context: Gives the seed and the number of processes, and where results are kept.
        cases: What to replay.

    Raises:
        MoelessError: Data is missing, or a policy cannot run.
    """
    cases = list(dict.fromkeys(cases))
    done: dict[Case, Outcome] = context.share(("replays",), dict)
    missing = [case for case in cases if case not in done]
    prepare_traces(context, [case.workload for case in missing])
    traces = {case: open_trace(context, case.workload) for case in missing}
    kept = {case: _kept_at(context, case, traces[case]) for case in missing}
    # Several cases may be one replay: a policy by its name, and left to what it chooses.
    waiting: dict[Path, list[Case]] = {}
    for case in missing:
        found = _load(kept[case])
        if found is None:
            waiting.setdefault(kept[case], []).append(case)
        else:
            done[case] = found
    ordered = sorted(
        waiting.items(), key=lambda each: _LONGEST.get(each[1][0].policy, 0), reverse=True
    )
    jobs = [Job(cases[0].name, (cases[0], traces[cases[0]], context.seed)) for _, cases in ordered]

    def note(place: int, outcome: Outcome) -> None:
        path, same = ordered[place]
        _save(path, outcome)
        done.update(dict.fromkeys(same, outcome))

    context.compute("replaying", _replay_job, jobs, note)
    return {case: done[case] for case in cases}


def replay_case(case: Case, trace: StudyTrace, seed: int) -> Outcome:
    """Replay one case here."""
    case = case.resolved
    prepared = _prepare(case, trace, seed)
    recording = _record(case, prepared, trace)
    loads_NLE = prepared.trace.loads_NLE
    config = metrics_config(prepared, case.policy)
    figures = measure_policy(recording, loads_NLE, config=config)
    for name in _CHANGING:
        del figures[name]
    first = num_warm_up_steps(recording.num_steps)
    busy_NL = loads_NLE[first:].any(axis=2)
    return Outcome(figures=figures, layer_ms=recording.layer_s_SL[first:][busy_NL] * 1e3)


def _replay_job(job: tuple[Case, StudyTrace, int]) -> Outcome:
    return replay_case(*job)


def _prepare(case: Case, trace: StudyTrace, seed: int) -> PreparedReplay:
    looks_back = case.prediction in ("previous", "ewma")
    task = ReplayTask(
        routing=trace.path,
        policies=(case.policy,),
        devices=case.devices,
        prediction=case.prediction,
        distance=None if looks_back else case.distance,
        cost_model=case.hardware,
        seed=seed,
        keep_alive_s=case.keep_alive_s,
        options=PolicyOptions(
            memory_factor=case.memory_factor or "auto", cv_threshold=case.cv_threshold
        ),
    )
    prepared = prepare_replay(task)
    return replace(prepared, load_s=prepared.load_s / case.link)


def _record(case: Case, prepared: PreparedReplay, study: StudyTrace) -> Recording:
    """As ``replay_job``, but for variants of policies, and for those that know a history."""
    if case.policy == ORACLE:
        return replay_job(
            describe_job(prepared, ORACLE), prepared.trace, on_step=lambda _step: None
        )
    task, trace, prediction = prepared.task, prepared.trace, prepared.prediction
    clock, cost = SimulatedClock(), prepared.time_model.cost
    keep_s = math.inf if is_serverful(case.policy) else task.keep_alive_s
    return replay_policy(
        trace,
        build_variant(
            case.policy,
            case.without,
            cost=cost,
            options=task.options,
            clock=clock,
            history=prediction.history,
            history_LE=study.history_LE,
        ),
        clock=clock,
        time_model=prepared.time_model,
        forecast=build_forecast(prediction, trace, seed=task.seed),
        keep_alive=KEEP_ALIVES.create("fixed", seconds=keep_s),
        config=ReplayConfig(
            num_devices=task.devices,
            device_bytes=prepared.device_bytes,
            expert=prepared.expert,
            load_s=prepared.load_s,
            lookahead=prediction.distance,
            decision_s=task.decision_s,
            search_s=task.search_s,
            tick_s=None if math.isinf(keep_s) else min(max(keep_s / 10, 0.25), 30.0),
            max_replicas=max_replicas(
                case.policy,
                task.options,
                num_experts=trace.meta.num_experts,
                num_devices=task.devices,
            ),
        ),
    )


def _kept_at(context: Context, case: Case, trace: StudyTrace) -> Path:
    known = hashlib.sha256(json.dumps([_code_digest(), context.seed, case.resolved]).encode())
    known.update(trace.trace.loads_NLE.tobytes())
    known.update(trace.history_LE.tobytes())
    if case.prediction == "recorded" and trace.trace.predicted_NLE is not None:
        known.update(trace.trace.predicted_NLE.tobytes())
    return context.cache / "replays" / f"{known.hexdigest()[:32]}.npz"


@cache
def _code_digest() -> str:
    """Of all code that decides what a replay gives."""
    root = Path(moeless.__file__).parent
    files = [path for part in _CODE for path in sorted((root / part).rglob("*.py"))]
    files += sorted(Path(__file__).parent.glob("replay*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _load(path: Path) -> Outcome | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            figures = json.loads(str(archive["figures"]))
            return Outcome(figures=figures, layer_ms=archive["layer_ms"])
    except (OSError, ValueError, KeyError):
        return None  # not kept, or damaged: it is made again


def _save(path: Path, outcome: Outcome) -> None:
    # A cache that cannot be written to is none.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file, figures=np.array(json.dumps(outcome.figures)), layer_ms=outcome.layer_ms
            )
