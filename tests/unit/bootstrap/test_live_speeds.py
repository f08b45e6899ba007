"""When the speeds of devices are heeded while serving."""

from pathlib import Path

import pytest

from moeless.bootstrap.serving.control import build_splitter
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.layer_cost import LayerCost
from moeless.policies.splitters.live_speeds import LiveSpeedSplitter


@pytest.mark.parametrize(
    ("options", "live"),
    [
        ({}, True),
        ({"live_speeds": False}, False),
        ({"events": Path("events.jsonl")}, False),
        ({"policy": PolicyConfig(policy="static")}, False),
    ],
)
def test_speeds_are_heeded_by_default_where_time_is_and_no_record_is_made(options, live):
    config = ExpertsConfig(devices=parse_devices("cpu:2"), **options)
    splitter = build_splitter(config, LayerCost(token_s=1e-6))
    assert isinstance(splitter, LiveSpeedSplitter) is live
