"""Builds what makes a served model's forecasts. Needs torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moeless.bootstrap.serving.control import heeds_forecasts
from moeless.bootstrap.serving.live_first_layers import LiveFirstLayers
from moeless.bootstrap.serving.live_predictor import LivePredictor
from moeless.bootstrap.serving.predictor_choice import choose_predictor
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import SystemClock
from moeless.engines.transformers.gate_access import find_gates
from moeless.engines.transformers.loader import LoadedModel
from moeless.errors import ConfigError
from moeless.functions.token_path.announcer import ExpectedLoad, LookAhead
from moeless.learned.gate_predictor import Gate, GatePredictor
from moeless.learned.load_predictor import LoadPredictor
from moeless.learned.predictor_file import load_predictor
from moeless.learned.predictor_manifest import read_predictor_manifest
from moeless.learned.trained_predictor import TrainedPredictor
from moeless.telemetry.fanout import FanoutSink
from moeless.telemetry.jsonl import JsonlSink
from moeless.telemetry.snapshot import PredictorState


@dataclass(frozen=True, kw_only=True)
class ServingLookAhead:
    """How the loads of a served model are expected.

    Args:
        on_path: What the token path calls.
        state: What it is at this moment, for metrics.
        close: Ends what runs in the background.
    """

    on_path: LookAhead
    state: Callable[[], PredictorState]
    close: Callable[[], None] = lambda: None

    @property
    def distance(self) -> int:
        """d, layers that are looked ahead; 0 where nothing is forecast."""
        return self.on_path.distance


def check_predictor(config: PolicyConfig) -> None:
    """Refuse a predictor that cannot serve, before anything is loaded or started.

    Raises:
        ConfigError: No such predictor, one of another distance or that reads what serving does
            not have, or a policy that would not use it.
        CheckpointError: A directory without a predictor, or with a damaged one.
    """
    choice = choose_predictor(config.predictor)
    if choice.kind not in ("trained", "auto"):
        return
    if not heeds_forecasts(config):
        raise ConfigError(
            f"policy {config.policy} plans without forecasts, so predictor {config.predictor} "
            f"would do nothing; use --policy moeless or paper, or leave --predictor out"
        )
    if choice.directory is None:
        return
    manifest = read_predictor_manifest(choice.directory)
    if manifest.reads != "gate_input":
        raise ConfigError(
            f"predictor {choice.directory} reads what enters a layer, but serving looks ahead "
            f"from what enters its gate; train one that reads gate inputs"
        )
    if config.distance is not None:
        manifest.require_distance(config.distance, where=choice.directory)


def build_look_ahead(
    loaded: LoadedModel,
    config: ExpertsConfig,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> ServingLookAhead:
    """What makes the forecasts of a model.

    Args:
        loaded: The model.
        config: How its experts run; checked by ``check_predictor``.
        tell: Told in a line when a predictor is replaced while it serves.

    Raises:
        ConfigError: The predictor is that of another model, or the model has too few layers.
        CheckpointError: It is damaged.
    """
    policy = config.policy
    choice = choose_predictor(policy.predictor)
    if not (choice.looks_ahead and heeds_forecasts(policy)):
        return _unseeing(choice.history, 0)
    gates = find_gates(loaded.model, loaded.spec.layer_ids)
    if choice.directory is not None:
        predictor, _ = load_predictor(
            choice.directory, gates=gates, model=loaded.spec.model_id, distance=policy.distance
        )
        return _trained(choice.name, gates, predictor, str(choice.directory))
    if policy.distance is not None and policy.distance >= len(gates):
        most = len(gates) - 1
        has = f"{len(gates)} MoE layers; use {most} or less"
        raise ConfigError(
            f"--distance {policy.distance} looks ahead at nothing: {loaded.spec.model_id} has "
            f"{has if most else 'one MoE layer; leave --distance out'}"
        )
    distance = policy.distance or 1
    if distance >= len(gates):  # every layer is among the first d
        return _unseeing(choice.name, distance)
    if choice.kind == "auto":
        return _live(loaded, gates, distance, config.events, tell)
    return _copied(choice.name, GatePredictor(gates, distance))


def _unseeing(kind: str, distance: int) -> ServingLookAhead:
    state = PredictorState(kind=kind, distance=distance)
    return ServingLookAhead(on_path=LookAhead(distance=distance), state=lambda: state)


def _copied(kind: str, predictor: LoadPredictor) -> ServingLookAhead:
    state = PredictorState(kind=kind, distance=predictor.distance)

    def forecast(layer: int, x_TH: torch.Tensor) -> ExpectedLoad | None:
        load_E = predictor.predict(layer, x_TH)
        return None if load_E is None else ExpectedLoad(load_E)

    on_path = LookAhead(distance=predictor.distance, forecast=forecast)
    return ServingLookAhead(on_path=on_path, state=lambda: state)


def _trained(
    kind: str, gates: list[Gate], predictor: TrainedPredictor, source: str
) -> ServingLookAhead:
    state = PredictorState(kind=kind, distance=predictor.distance, source=source)
    live = LiveFirstLayers(gates, predictor)
    live.start()
    on_path = LookAhead(
        distance=predictor.distance,
        forecast=live.forecast,
        forecast_first=live.forecast_first,
        notice=live.notice,
    )
    return ServingLookAhead(on_path=on_path, state=lambda: state, close=live.close)


def _live(
    loaded: LoadedModel,
    gates: list[Gate],
    distance: int,
    events: Path | None,
    tell: Callable[[str], None],
) -> ServingLookAhead:
    sink = FanoutSink() if events is None else JsonlSink(events)
    live = LivePredictor(
        gates,
        distance,
        model=loaded.spec.model_id,
        clock=SystemClock(),
        sink=sink,
        tell=tell,
    )
    live.start()
    on_path = LookAhead(
        distance=distance,
        forecast=live.forecast,
        forecast_first=live.forecast_first,
        notice=live.notice,
    )
    return ServingLookAhead(on_path=on_path, state=live.state, close=live.close)
