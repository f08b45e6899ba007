"""One question per layer has the time model's own answer."""

import numpy as np
import pytest

from moeless.core.layer_cost import LayerCost
from moeless.costs.linear import LinearTime
from moeless.costs.table import TableTime
from moeless.simulator.layer_timer import LayerTimer

MODELS = [
    LinearTime(cost=LayerCost(token_s=2.0, transfer_s=0.5), label="tokens only"),
    LinearTime(cost=LayerCost(base_s=3, touch_s=5, token_s=2, transfer_s=0.5), label="all"),
    LinearTime(cost=LayerCost(base_s=3, token_s=2), label="launch"),
    TableTime(
        tokens_A=np.array([1.0, 8.0]),
        touched_B=np.array([1.0, 4.0]),
        seconds_AB=np.array([[1.0, 2.0], [3.0, 5.0]]),
        transfer_s=0.25,
    ),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.label)
def test_layer_and_device_times_are_the_models(model):
    rng = np.random.default_rng(0)
    for _ in range(30):
        share_ED = rng.integers(0, 5, size=(6, 3)) * rng.integers(0, 2, size=(6, 3))
        layer_s, busy_s = LayerTimer(model).measure(share_ED, share_ED.sum(axis=0))
        assert layer_s == pytest.approx(model.layer_s(share_ED), rel=1e-12)
        assert busy_s == pytest.approx(model.device_s(share_ED).sum(), rel=1e-12)
