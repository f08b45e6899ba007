"""Builds the policies and the control loop of a served model from names."""

from collections.abc import Sequence
from pathlib import Path

from moeless.bootstrap.policies import PolicyOptions, build_policy_set
from moeless.bootstrap.serving.predictor_choice import choose_predictor
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.control.controller import Controller, ControllerConfig
from moeless.control.search import InlineSearcher, ThreadSearcher
from moeless.core.clock import SystemClock
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.core.policy_set import PolicySet
from moeless.core.ports import Clock, EventSink, Placement, Splitter
from moeless.costs.gpu_cost import gpu_cost
from moeless.costs.presets import device_preset
from moeless.costs.time_models import build_time_model
from moeless.functions.planning.elastic_loop import ElasticLoop
from moeless.functions.planning.load_intake import LoadConsumer
from moeless.functions.planning.load_report import LoadReport
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.policies.splitters.live_speeds import LiveSpeedSplitter
from moeless.policies.splitters.min_time import MinTimeSplitter
from moeless.telemetry.fanout import FanoutSink
from moeless.telemetry.jsonl import JsonlSink
from moeless.telemetry.log import FailureLog

_ANY_COST = LayerCost(token_s=1.0)
"""Where nothing is decided yet, only looked up."""
_DECIDING_SHARE = 0.01
"""Part of a core for plans that would not change; waking up and forecasts cost as much again."""
_ANY_EXPERT = ExpertShape(hidden=1, intermediate=1)


def check_policy_config(config: PolicyConfig) -> None:
    """Refuse names and numbers that no policy can be built from.

    Raises:
        ConfigError: No planner, predictor or cost model has that name, or a number is out of
            range.
    """
    build_policies(config, cost=_ANY_COST, clock=SystemClock())
    if config.cost_model is not None:
        build_time_model(config.cost_model, _ANY_EXPERT, 1)


def serving_cost(
    expert: ExpertShape, torch_devices: Sequence[str], cost_model: str | None = None
) -> LayerCost:
    """What serving policies take experts to cost in time.

    Args:
        expert: Shape of the served experts.
        torch_devices: Where they run, as torch names devices [D].
        cost_model: A time model by name or file; None takes a preset's figures, which nobody has
            measured here.

    Raises:
        ConfigError: No such time model.
    """
    if cost_model is not None:
        return build_time_model(cost_model, expert, len(torch_devices)).cost
    preset = device_preset("h200" if torch_devices[0].startswith("cuda") else "cpu")
    return gpu_cost(expert, preset, num_devices=len(torch_devices))[0]


def build_policies(config: PolicyConfig, *, cost: LayerCost, clock: Clock) -> PolicySet:
    """The policies that the configuration names.

    Args:
        config: Names and numbers.
        cost: What experts cost in time, for the parts that optimise it.
        clock: The time.

    Raises:
        ConfigError: No planner or predictor has that name, or a number is out of range.
    """
    return build_policy_set(
        config.policy,
        cost=cost,
        options=PolicyOptions(
            memory_factor=config.memory_factor,
            cv_threshold=config.cv_threshold,
            eplb_interval_s=config.eplb_interval_s,
        ),
        clock=clock,
        history=choose_predictor(config.predictor).history,
        splitter=config.splitter,
    )


def build_splitter(config: ExpertsConfig, cost: LayerCost) -> Splitter:
    """What divides the tokens of a served model.

    Args:
        config: Names and numbers.
        cost: What experts cost in time.

    Raises:
        ConfigError: No planner, predictor or splitter has that name.
    """

    def build(cost: LayerCost) -> Splitter:
        return build_policies(config.policy, cost=cost, clock=SystemClock()).splitter

    splitter = build(cost)
    # A run that is recorded is to be repeated, which measured times would be in the way of.
    by_time = isinstance(splitter, MinTimeSplitter)
    live = config.live_speeds and by_time and config.events is None
    return LiveSpeedSplitter(build, cost) if live else splitter


def heeds_forecasts(config: PolicyConfig) -> bool:
    """Whether the policy plans from what is forecast.

    Raises:
        ConfigError: No planner or predictor has that name.
    """
    policies = build_policies(config, cost=_ANY_COST, clock=SystemClock())
    return policies.adaptive and policies.uses_forecasts and policies.replan_every_s is None


def build_controller(
    config: PolicyConfig,
    model: ModelPlacement,
    *,
    torch_devices: Sequence[str],
    lookahead: int,
    clock: Clock,
    sink: EventSink,
    record: bool,
) -> LoadConsumer:
    """The control loop of one model.

    Args:
        config: How loads become replicas.
        model: The model on its platform.
        torch_devices: Where its experts run, as torch names devices [D].
        lookahead: d of the engine's forecasts, 0 for none.
        clock: The time.
        sink: Receives events.
        record: Whether events say what each decision was made from.

    Raises:
        ConfigError: No planner or predictor has that name, or a number is out of range.
    """
    model.wakes = config.wake_ahead
    cost = serving_cost(model.spec.expert, torch_devices, config.cost_model)
    # One for all controllers to come: its thread lives as long as the process.
    searcher = ThreadSearcher() if config.search_beside else InlineSearcher()

    def build(placement: Placement, earlier: Controller | None) -> Controller:
        controller = Controller(
            ControllerConfig(
                model=model.spec.model_id,
                num_layers=model.spec.num_layers,
                num_experts=model.spec.num_experts,
                lookahead=lookahead,
                share=None if record else _DECIDING_SHARE,
            ),
            policies=build_policies(config, cost=cost, clock=clock),
            placement=placement,
            clock=clock,
            sink=sink,
            searcher=searcher,
        )
        if earlier is not None:
            controller.inherit(earlier)
        return controller

    loop = ElasticLoop(model, build=build)
    return LoadReport(loop, model=model, clock=clock, sink=sink) if record else loop


def build_sink(events: Path | None, clock: Clock) -> EventSink:
    """Where the platform's events go: failures to the log, and all to a file if one is named.

    Args:
        events: The file.
        clock: The time.

    Raises:
        ConfigError: The file cannot be written.
    """
    failures = FailureLog(clock)
    return failures if events is None else FanoutSink(JsonlSink(events), failures)
