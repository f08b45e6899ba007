"""The file that events go to."""

import pytest

from moeless.bootstrap.serving.experts import check_experts_config
from moeless.config import ExpertsConfig
from moeless.core.cluster import parse_devices
from moeless.errors import ConfigError


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "missing" / "events.jsonl"
    config = ExpertsConfig(devices=parse_devices("cpu:2"), events=path)
    with pytest.raises(ConfigError, match="cannot write events to"):
        check_experts_config(config)
