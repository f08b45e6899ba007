"""What serving policies take experts to cost in time."""

import json

import pytest

from moeless.bootstrap.serving.control import check_policy_config, serving_cost
from moeless.config import PolicyConfig
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.errors import ConfigError

EXPERT = ExpertShape(hidden=64, intermediate=128)


def test_a_file_of_measurements_replaces_the_figures_of_the_device(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"base_s": 1e-4, "touch_s": 2e-5, "token_s": 3e-6}))
    cost = serving_cost(EXPERT, ["cpu", "cpu"], str(path))
    assert cost == LayerCost(base_s=1e-4, touch_s=2e-5, token_s=3e-6)
    assert serving_cost(EXPERT, ["cpu", "cpu"]) != cost


def test_a_cost_model_that_is_not_there_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"neither paper, h200, a6000 nor a file"):
        check_policy_config(PolicyConfig(cost_model="nothing.json"))
