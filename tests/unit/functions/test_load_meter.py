"""Loads are timed from their orders, and the time of a device is counted once."""

import numpy as np
import pytest

from moeless.core.clock import ManualClock
from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.platform.platform import Platform
from moeless.functions.pool.load_limits import LoadLimits
from moeless.policies.keep_alive.fixed import FixedKeepAlive
from moeless.telemetry.memory import MemorySink

BYTES = 100


class Host:
    def load(self, *functions):
        pass

    def evict(self, function, *, reason):
        pass


@pytest.fixture
def clock():
    return ManualClock(0.0)


@pytest.fixture
def platform(clock):
    platform = Platform(
        [10 * BYTES] * 2,
        clock=clock,
        keep_alive=FixedKeepAlive(1e9),
        sink=MemorySink(),
        limits=LoadLimits(batch_bytes=2 * BYTES),
    )
    spec = ModelSpec(
        model_id="m",
        family="mixtral",
        layer_ids=(0,),
        num_experts=4,
        top_k=1,
        expert=ExpertShape(hidden=1, intermediate=1),
    )
    board = Board.in_process(num_layers=1, num_experts=4, num_devices=2)
    platform.add_model(spec, function_bytes=BYTES, board=board)
    for engine in (0, 1):
        platform.join(platform.models["m"], engine, board)
    for device in (0, 1):
        platform.device_up(device, Host())
    return platform


def order(platform, *experts, device=0):
    model = platform.models["m"]
    for expert in experts:
        platform.want(model, 0, expert, device)
    platform.advance()
    return [model.function(0, expert) for expert in experts]


def test_loads_that_were_ordered_ahead_count_the_time_of_their_device_once(platform, clock):
    first, second = order(platform, 0, 1)
    clock.advance(2.0)
    platform.loaded(0, first)
    clock.advance(3.0)
    platform.loaded(0, second)
    clock.advance(100.0)  # idle, which is no time of loads
    (third,) = order(platform, 2)
    clock.advance(1.0)
    platform.loaded(0, third)
    report = platform.models["m"].report()
    assert report["loaded_bytes_D"] == [3 * BYTES, 0]
    assert report["loading_s_D"] == [6.0, 0.0]
    cold = report["cold_start_s_D"][0]
    assert (cold["count"], cold["total_s"], cold["p50_s"]) == (3, 8.0, 2.0)
    assert report["cold_start_s_D"][1]["count"] == 0


def test_loads_that_are_reported_together_share_their_time(platform, clock):
    functions = order(platform, 0, 1, device=1)
    clock.advance(4.0)
    platform.loaded(1, *functions)
    report = platform.models["m"].report()
    assert report["loading_s_D"] == [0.0, 4.0]
    assert report["loaded_bytes_D"] == [0, 2 * BYTES]


def test_a_load_that_failed_brings_nothing_and_is_no_cold_start(platform, clock):
    first, second = order(platform, 0, 1)
    clock.advance(2.0)
    platform.failed(0, first, reason="no memory")
    clock.advance(1.0)
    platform.loaded(0, second)
    report = platform.models["m"].report()
    assert report["loaded_bytes_D"] == [BYTES, 0]
    assert report["loading_s_D"] == [1.0, 0.0]


def test_what_engines_of_a_model_are_told_adds_up(platform, clock):
    for expert in range(4):
        function = order(platform, expert)
        clock.advance(0.5)
        platform.loaded(0, *function)
    model = platform.models["m"]
    parts, whole = [model.report(engine) for engine in (0, 1)], model.report()
    for name in ("loaded_bytes_D", "loading_s_D"):
        assert np.allclose(np.sum([part[name] for part in parts], axis=0), whole[name])
    for name in ("count", "total_s"):
        told = [part["cold_start_s_D"][0][name] for part in parts]
        assert sum(told) == pytest.approx(whole["cold_start_s_D"][0][name])
