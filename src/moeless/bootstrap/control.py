"""Builds the control loop of a model from names."""

from moeless.config import PolicyConfig
from moeless.control.controller import Controller, ControllerConfig
from moeless.core.ports import Clock, EventSink, Planner, Predictor
from moeless.errors import ConfigError
from moeless.functions.platform import ModelPlacement
from moeless.policies.planners import PLANNERS
from moeless.policies.predictors import PREDICTORS


def build_planner(config: PolicyConfig) -> Planner:
    """The planner that the configuration names.

    Raises:
        ConfigError: No planner has that name.
    """
    options: dict[str, object] = {}
    if config.policy == "paper":
        options = {"memory_factor": config.memory_factor, "cv_threshold": config.cv_threshold}
    return PLANNERS.create(config.policy, **options)


def build_predictor(config: PolicyConfig) -> Predictor:
    """The predictor from history; ``gate`` uses ``previous`` for the layers it cannot see.

    Raises:
        ConfigError: No predictor has that name.
    """
    if config.predictor == "gate":
        return PREDICTORS.create("previous")
    if config.predictor not in PREDICTORS.names():
        known = ", ".join(("gate", *PREDICTORS.names()))
        raise ConfigError(f"unknown predictor {config.predictor!r}; known are: {known}")
    return PREDICTORS.create(config.predictor)


def build_controller(
    config: PolicyConfig, model: ModelPlacement, *, lookahead: int, clock: Clock, sink: EventSink
) -> Controller:
    """The control loop of one model.

    Args:
        config: Names and numbers of the policies.
        model: The model on its platform.
        lookahead: d of the engine's forecasts, 0 for none.
        clock: The time.
        sink: Receives events.
    """
    planner = build_planner(config)
    return Controller(
        ControllerConfig(
            model=model.spec.model_id,
            num_layers=model.spec.num_layers,
            num_experts=model.spec.num_experts,
            lookahead=lookahead,
            adaptive=getattr(planner, "adaptive", True),
        ),
        predictor=build_predictor(config),
        planner=planner,
        placement=model,
        clock=clock,
        sink=sink,
    )
