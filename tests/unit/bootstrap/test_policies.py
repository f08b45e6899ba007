"""What the names of policies stand for."""

import pytest

from moeless.bootstrap.policies import (
    PolicyOptions,
    build_policy_set,
    is_serverful,
    max_replicas,
)
from moeless.core.clock import ManualClock
from moeless.core.layer_cost import LayerCost
from moeless.errors import ConfigError
from moeless.policies.predictors.ewma import EwmaPredictor
from moeless.policies.predictors.previous import PreviousPredictor
from moeless.policies.predictors.window import WindowPredictor
from moeless.policies.splitters.even import EvenSplitter
from moeless.policies.splitters.min_time import MinTimeSplitter
from moeless.policies.splitters.slots import SlotSplitter


def build(name, *, options=None, **keywords):
    return build_policy_set(
        name,
        cost=LayerCost(token_s=1.0),
        options=options or PolicyOptions(),
        clock=ManualClock(),
        **keywords,
    )


@pytest.mark.parametrize(
    ("name", "splitter", "history", "interval_s", "adaptive", "uses_forecasts"),
    [
        ("static", EvenSplitter, PreviousPredictor, None, False, False),
        ("paper", EvenSplitter, PreviousPredictor, None, True, True),
        ("eplb", SlotSplitter, WindowPredictor, 600.0, True, False),
        ("swift", EvenSplitter, WindowPredictor, 60.0, True, False),
        ("moeless", MinTimeSplitter, PreviousPredictor, None, True, True),
    ],
)
def test_each_name_is_a_whole_policy(
    name, splitter, history, interval_s, adaptive, uses_forecasts
):
    policies = build(name)
    assert policies.name == name
    assert isinstance(policies.splitter, splitter)
    assert isinstance(policies.history, history)
    assert policies.replan_every_s == interval_s
    assert (policies.adaptive, policies.uses_forecasts) == (adaptive, uses_forecasts)
    assert is_serverful(name) == (not uses_forecasts)


def test_history_and_splitter_can_be_chosen_but_not_the_window_of_eplb():
    policies = build("paper", history="ewma", splitter="min_time")
    assert isinstance(policies.history, EwmaPredictor)
    assert isinstance(policies.splitter, MinTimeSplitter)
    options = PolicyOptions(eplb_interval_s=5.0)
    policies = build("eplb", history="ewma", options=options)
    assert isinstance(policies.history, WindowPredictor)
    assert policies.replan_every_s == 5.0


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="unknown planner 'best'"):
        build("best")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_is_a_number_of_seconds(value):
    with pytest.raises(ConfigError, match="swift_interval_s"):
        PolicyOptions(swift_interval_s=value)


@pytest.mark.parametrize(
    ("name", "factor", "experts", "devices", "expected"),
    [
        ("static", 2.0, 8, 8, None),
        ("paper", 1.15, 20, 8, 23),
        ("paper", 1.0, 8, 8, 8),
        ("eplb", 1.25, 8, 8, 16),
        ("eplb", 1.5, 32, 8, 48),
        ("swift", 1.1, 10, 4, 12),
        ("swift", 1.05, 10, 1, 11),
        ("moeless", "auto", 8, 8, 16),
    ],
)
def test_the_ceiling_of_replicas_follows_the_memory_factor(
    name, factor, experts, devices, expected
):
    options = PolicyOptions(memory_factor=factor)
    found = max_replicas(name, options, num_experts=experts, num_devices=devices)
    assert found == expected
