"""From what a user asks to a replay that can run: trace, machine, and every number resolved."""

import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moeless import __version__
from moeless.bootstrap.policies import ORACLE, PolicyOptions
from moeless.core.cluster import parse_speeds
from moeless.core.model import ExpertShape
from moeless.costs.linear import LinearTime
from moeless.costs.links import LinkTimes
from moeless.costs.models import known_model
from moeless.costs.presets import device_preset
from moeless.costs.time_models import build_time_model
from moeless.errors import BudgetError, ConfigError, TraceError
from moeless.policies.planners import PLANNERS
from moeless.simulator.forecasts import Prediction, parse_prediction
from moeless.simulator.layer_timer import TimeModel
from moeless.simulator.optimum import require_scipy
from moeless.simulator.optimum_samples import sample_layer_steps
from moeless.workloads.arrivals import read_arrivals
from moeless.workloads.compose import compose_decode, compose_prefill
from moeless.workloads.routing_trace import RoutingTrace, read_trace

Composition = Literal["prefill", "decode"]
_LONGEST_S = 3600.0
"""Of what a layer, a plan or a search may be said to take."""
_MOST_DEVICES = 4096
"""As for ``moeless plan``."""


@dataclass(frozen=True, kw_only=True)
class ReplayTask:
    """What a user asks for.

    Args:
        routing: A routing trace, of steps or of requests.
        policies: Names of planners, and ``oracle``.
        arrivals: An arrival trace; needed for requests, refused for steps.
        compose: How requests become steps; None for prefill.
        devices: D.
        prediction: ``noisy:SIGMA``, ``exact``, ``recorded``, ``previous`` or ``ewma``.
        distance: Layers looked ahead; None for 1, or what was recorded.
        cost_model: ``paper``, ``h200``, ``a6000`` or a JSON file.
        device_preset: Memory and links of a device; None for the cost model's own, which is
            ``a6000`` for ``paper`` and for files.
        device_speeds: Relative speed of each device, such as ``1,1,0.5,0.5``; None for equal
            ones.
        expert_shape: ``HIDDENxINTER``; None looks the trace's model up.
        device_memory_bytes: Memory for experts on each device; None for the preset's, or more
            where the memory factor needs more.
        seed: Of composition and noise.
        options: What policies are told.
        keep_alive_s: How long idle instances of serverless policies stay.
        keep_alive_rule: By which rule.
        decision_s: Simulated time of one planning decision.
        search_s: Simulated time of one search beside planning.
        misc_s: T_misc, simulated time of everything but the experts, per layer.
        misc_bytes: M_misc of the paper's accounting.
        max_steps: Replay only so many steps.
        keep_replicas: Whether every layer-step's replicas are recorded.
        optimum: Layer-steps to sample and hold against the best split over their replicas.
        explain: Step and layer to explain.
    """

    routing: Path
    policies: tuple[str, ...]
    arrivals: Path | None = None
    compose: Composition | None = None
    devices: int = 8
    prediction: str = "noisy:0.12"
    distance: int | None = None
    cost_model: str = "paper"
    device_preset: str | None = None
    device_speeds: str | None = None
    expert_shape: str | None = None
    device_memory_bytes: int | None = None
    seed: int = 0
    options: PolicyOptions = field(default_factory=PolicyOptions)
    keep_alive_s: float = 300.0
    keep_alive_rule: str = "fixed"
    decision_s: float = 100e-6
    search_s: float = 5e-3
    misc_s: float = 0.0
    misc_bytes: int = 0
    max_steps: int | None = None
    keep_replicas: bool = False
    optimum: int = 0
    explain: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedReplay:
    """A replay with nothing left to look up.

    Args:
        task: What was asked.
        trace: The steps.
        expert: Shape of every expert.
        time_model: How long layers take.
        prediction: How loads are expected.
        device_bytes: Memory for experts on each device.
        load_s: Seconds of one load on a free link.
        samples: Step and layer of each sampled layer-step.
    """

    task: ReplayTask
    trace: RoutingTrace
    expert: ExpertShape
    time_model: TimeModel
    prediction: Prediction
    device_bytes: int
    load_s: float
    samples: tuple[tuple[int, int], ...] = ()

    def config(self) -> dict[str, Any]:
        """Every number that the results depend on, ready for JSON."""
        task = self.task
        factor = task.options.memory_factor
        return {
            "moeless": __version__,
            "seed": task.seed,
            "devices": task.devices,
            "policies": list(task.policies),
            "memory_factor": factor,
            "prediction": str(self.prediction),
            "distance": self.prediction.distance,
            "history": self.prediction.history,
            "cost_model": task.cost_model,
            "cost": {"label": self.time_model.label, **asdict(self.time_model.cost)},
            "device_preset": preset_name(task),
            "device_memory_bytes": self.device_bytes,
            "expert": {
                "hidden": self.expert.hidden,
                "intermediate": self.expert.intermediate,
                "bytes": self.expert.num_bytes,
            },
            "load_s": self.load_s,
            "keep_alive_s": task.keep_alive_s,
            "keep_alive_rule": task.keep_alive_rule,
            "decision_s": task.decision_s,
            "search_s": task.search_s,
            "misc_s": task.misc_s,
            "misc_bytes": task.misc_bytes,
            "cv_threshold": task.options.cv_threshold,
            "eplb_interval_s": task.options.eplb_interval_s,
            "swift_interval_s": task.options.swift_interval_s,
            "compose": task.compose,
            "arrivals": None if task.arrivals is None else task.arrivals.name,
            "max_steps": task.max_steps,
            "optimum": task.optimum,
        }


def prepare_replay(task: ReplayTask) -> PreparedReplay:
    """Read the inputs and resolve every number.

    Raises:
        ConfigError: Options that do not exist or do not go together.
        MissingExtraError: The optimum is asked for and scipy is not installed.
        TraceError: A trace that cannot be read or used.
        BudgetError: Devices too small for one layer's experts.
    """
    check_policies(task.policies)
    _check_numbers(task)
    trace = _steps(task)
    prediction = parse_prediction(task.prediction, distance=task.distance, trace=trace)
    if prediction.distance >= trace.meta.num_layers and prediction.distance > 1:
        raise ConfigError(
            f"--distance is {prediction.distance}, but the trace has {trace.meta.num_layers} "
            f"layers; look fewer layers ahead"
        )
    if task.explain is not None:
        _check_explain(task.explain, trace)
    expert = find_expert_shape(trace.meta.model, task.expert_shape)
    preset = device_preset(preset_name(task))
    speeds = () if task.device_speeds is None else parse_speeds(task.device_speeds, task.devices)
    time_model = build_time_model(task.cost_model, expert, task.devices, speeds=speeds)
    if task.optimum:
        _check_optimum(task, time_model)
    return PreparedReplay(
        task=task,
        trace=trace,
        expert=expert,
        time_model=time_model,
        prediction=prediction,
        device_bytes=_device_bytes(task, trace, expert, preset.memory_bytes),
        load_s=LinkTimes.of(preset).load_s(expert.num_bytes, "host"),
        samples=sample_layer_steps(trace.loads_NLE, task.optimum, seed=task.seed),
    )


def check_policies(names: tuple[str, ...]) -> None:
    """Refuse names that nobody knows, and names given twice.

    Raises:
        ConfigError: There is one.
    """
    known = (*PLANNERS.names(), ORACLE)
    if not names:
        raise ConfigError(f"--policies is empty; name some of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown policy {name!r}; known are: {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(f"--policies names {name} twice; name each policy once")


def preset_name(task: ReplayTask) -> str:
    """The preset of memory and links."""
    return task.device_preset or ("h200" if task.cost_model == "h200" else "a6000")


def find_expert_shape(model: str, text: str | None) -> ExpertShape:
    """The shape of a trace's experts.

    Args:
        model: The trace's model, looked up where ``text`` is None.
        text: ``HIDDENxINTER``.

    Raises:
        ConfigError: The model is not known, or the text is not a shape.
    """
    if text is None:
        known = known_model(model)
        if known is None:
            raise ConfigError(
                f"the shape of the experts of {model!r} is not known; give it with "
                f"--expert-shape HIDDENxINTER, for example 4096x14336"
            )
        return known.expert
    match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text.strip().lower())
    if match is None:
        raise ConfigError(f"--expert-shape {text!r} is not HIDDENxINTER, for example 4096x14336")
    return ExpertShape(hidden=int(match[1]), intermediate=int(match[2]))


def _steps(task: ReplayTask) -> RoutingTrace:
    trace = read_trace(task.routing)
    if trace.meta.unit == "steps":
        if task.arrivals is not None:
            raise TraceError(
                f"{task.routing} is a trace of steps, which is replayed as it is; leave "
                f"--arrivals out"
            )
        if task.compose is not None:
            raise TraceError(
                f"{task.routing} is a trace of steps, which is replayed as it is; leave "
                f"--compose out"
            )
        steps = trace
    else:
        if task.arrivals is None:
            raise TraceError(
                f"{task.routing} is a trace of requests: say when they arrive with --arrivals "
                f"CSV (TIMESTAMP,ContextTokens,GeneratedTokens)"
            )
        compose = compose_decode if task.compose == "decode" else compose_prefill
        steps = compose(trace, read_arrivals(task.arrivals), seed=task.seed)
    return steps if task.max_steps is None else _first_steps(steps, task.max_steps)


def _first_steps(trace: RoutingTrace, count: int) -> RoutingTrace:
    return replace(
        trace,
        loads_NLE=trace.loads_NLE[:count],
        tokens_N=trace.tokens_N[:count],
        time_s_N=None if trace.time_s_N is None else trace.time_s_N[:count],
        decode_tokens_N=None if trace.decode_tokens_N is None else trace.decode_tokens_N[:count],
        predicted_NLE=None if trace.predicted_NLE is None else trace.predicted_NLE[:count],
        group_N=None if trace.group_N is None else trace.group_N[:count],
        topk_ids_TLK=None,
        topk_offsets=None,
    )


def _check_numbers(task: ReplayTask) -> None:
    if task.devices < 1:
        raise ConfigError(f"--devices is {task.devices}; use 1 or more")
    if task.devices > _MOST_DEVICES:
        raise ConfigError(
            f"--devices is {task.devices}; use at most {_MOST_DEVICES}: the tokens of each device "
            f"are kept for every layer and step"
        )
    if task.seed < 0:
        raise ConfigError(f"--seed is {task.seed}; use 0 or more")
    if task.max_steps is not None and task.max_steps < 1:
        raise ConfigError(f"--max-steps is {task.max_steps}; use 1 or more")
    if task.optimum < 0:
        raise ConfigError(f"--optimum is {task.optimum}; use 0 (off) or more layer-steps")
    if not task.keep_alive_s >= 0:
        raise ConfigError(f"--keep-alive is {task.keep_alive_s}; use 0 seconds or more, or inf")
    for name in ("decision_s", "search_s", "misc_s"):
        value = getattr(task, name)
        if not 0 <= value <= _LONGEST_S:
            raise ConfigError(f"{name} is {value}; use 0 to {_LONGEST_S:g} seconds")


def _check_optimum(task: ReplayTask, time_model: TimeModel) -> None:
    require_scipy()
    if not isinstance(time_model, LinearTime):
        raise ConfigError(
            f"--optimum needs a linear time model, but {task.cost_model} is a table of "
            f"measurements; use paper, h200, a6000 or a file of coefficients"
        )


def _check_explain(explain: tuple[int, int], trace: RoutingTrace) -> None:
    step, layer = explain
    if not 0 <= step < len(trace):
        raise ConfigError(f"--explain: step {step} is not in 0..{len(trace) - 1}")
    if not 0 <= layer < trace.meta.num_layers:
        raise ConfigError(f"--explain: layer {layer} is not in 0..{trace.meta.num_layers - 1}")
    if not trace.tokens_N[step]:
        raise ConfigError(f"--explain: step {step} has no tokens; nothing runs in it")


def _device_bytes(
    task: ReplayTask, trace: RoutingTrace, expert: ExpertShape, preset_bytes: int
) -> int:
    experts, layers = trace.meta.num_experts, trace.meta.num_layers
    given = task.device_memory_bytes
    if given is not None:
        slots = task.devices * (given // expert.num_bytes)
        if slots < experts:
            least = -(-experts // task.devices) * expert.num_bytes
            raise BudgetError(
                f"--device-memory {given:,} bytes is too small: {task.devices} devices hold "
                f"{slots} experts of {expert.num_bytes:,} bytes, but a layer has {experts}; give "
                f"at least {least:,} bytes"
            )
        return given
    factor = task.options.fixed_memory_factor
    per_device = math.ceil(factor * experts / task.devices - 1e-9)
    # One more than the factor asks for, so that a replica can arrive before another one leaves.
    return max(preset_bytes, (min(per_device, experts) + 1) * layers * expert.num_bytes)
