"""What a replay resolves before it runs."""

import importlib.metadata

import pytest

from fakes.replays import draw_trace
from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.replays.replay import (
    ReplayTask,
    check_policies,
    find_expert_shape,
    prepare_replay,
)
from moeless.config import parse_memory_factor
from moeless.errors import ConfigError
from moeless.policies.planners.static import StaticPlanner
from moeless.workloads.routing_trace import write_trace


@pytest.fixture
def steps(tmp_path):
    path = tmp_path / "steps.npz"
    write_trace(draw_trace(steps=12, layers=2, experts=8), path)
    return path


def make_task(steps, **changes):
    return ReplayTask(**({"routing": steps, "policies": ("static",)} | changes))


def test_a_known_model_brings_its_shape_and_a_given_one_goes_first():
    assert find_expert_shape("mistralai/Mixtral-8x7B-v0.1", None).intermediate == 14336
    given = find_expert_shape("mistralai/Mixtral-8x7B-v0.1", "64x32")
    assert (given.hidden, given.intermediate) == (64, 32)


@pytest.mark.parametrize("text", ["64", "0x4", "64*32", "64x32x8", "x", ""])
def test_other_shapes_are_refused(text):
    with pytest.raises(ConfigError, match="HIDDENxINTER"):
        find_expert_shape("m", text)


@pytest.mark.parametrize(("text", "factor"), [("1", 1.0), ("1.25", 1.25), ("AUTO", "auto")])
def test_memory_factors_are_read(text, factor):
    assert parse_memory_factor(text) == factor


def test_device_memory_is_the_presets_or_what_the_factor_needs(steps):
    small = prepare_replay(make_task(steps, expert_shape="64x64"))
    assert small.device_bytes == 48 * 10**9
    huge = prepare_replay(make_task(steps, expert_shape="65536x131072", devices=4))
    # Two replicas per expert on four devices, and one more so that replicas can move.
    assert huge.device_bytes == (4 + 1) * 2 * huge.expert.num_bytes
    given = prepare_replay(make_task(steps, expert_shape="64x64", device_memory_bytes=10**6))
    assert given.device_bytes == 10**6


def test_loads_take_what_the_preset_of_the_cost_model_takes(steps):
    a6000 = prepare_replay(make_task(steps, expert_shape="4096x14336"))
    assert a6000.load_s == pytest.approx(352_321_536 / 32e9)
    h200 = prepare_replay(make_task(steps, expert_shape="4096x14336", cost_model="h200"))
    assert h200.load_s == pytest.approx(352_321_536 / 64e9)
    mixed = make_task(steps, expert_shape="4096x14336", cost_model="h200", device_preset="a6000")
    assert prepare_replay(mixed).load_s == a6000.load_s


def test_the_papers_cost_has_neither_launch_nor_reading(steps):
    cost = prepare_replay(make_task(steps, expert_shape="4096x14336")).time_model.cost
    assert (cost.base_s, cost.touch_s) == (0.0, 0.0)
    assert cost.transfer_s > 0


def test_the_config_names_every_number(steps):
    task = make_task(steps, expert_shape="64x64", seed=3, max_steps=5)
    prepared = prepare_replay(task)
    config = prepared.config()
    assert len(prepared.trace) == 5
    assert config["seed"] == 3
    assert config["cost"]["token_s"] > 0
    assert config["memory_factor"] == 2.0
    assert config["distance"] == 1
    assert config["history"] == "previous"


def test_a_third_partys_planner_is_a_policy_of_its_own(monkeypatch):
    entry = importlib.metadata.EntryPoint(
        name="planner.mine",
        value="moeless.policies.planners.static:StaticPlanner",
        group="moeless.policies",
    )
    monkeypatch.setattr(
        "moeless.policies.registry.entry_points", lambda group: [entry] if group else []
    )
    from moeless.bootstrap.policies import build_policy_set, max_replicas
    from moeless.core.clock import ManualClock
    from moeless.core.layer_cost import LayerCost
    from moeless.policies.splitters.even import EvenSplitter

    check_policies(("static", "mine"))
    options = PolicyOptions()
    policies = build_policy_set(
        "mine", cost=LayerCost(token_s=1.0), options=options, clock=ManualClock()
    )
    assert isinstance(policies.planner, StaticPlanner)
    assert isinstance(policies.splitter, EvenSplitter)
    assert policies.uses_forecasts
    assert max_replicas("mine", options, num_experts=8, num_devices=4) == 16
