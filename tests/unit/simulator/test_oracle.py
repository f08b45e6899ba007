"""Perfect balance that ignores the gate."""

import numpy as np
import pytest

from fakes.replays import COST, make_trace
from moeless.core.layer_cost import LayerCost
from moeless.costs.linear import LinearTime
from moeless.simulator.oracle import Oracle


def make_oracle(devices=4, cost=COST, **options):
    return Oracle(
        time_model=LinearTime(cost=cost, label="test"),
        num_devices=devices,
        function_bytes=10**9,
        **options,
    )


@pytest.mark.parametrize("devices", [1, 3, 4, 10])
@pytest.mark.parametrize("experts", [1, 5, 8])
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_tokens_are_divided_equally_and_none_is_lost(devices, experts, tokens):
    share_WD = make_oracle(devices).share_WD(tokens, num_experts=experts)
    assert share_WD.sum() == tokens
    assert np.ptp(share_WD.sum(axis=0)) <= 1
    assert max(np.ptp(column) for column in share_WD.T) <= 1
    assert len(share_WD) == max(1, -(-experts // devices))


def test_a_device_touches_the_experts_that_static_parallelism_would_give_it():
    cost = LayerCost(base_s=1.0, touch_s=10.0, token_s=1.0)
    trace = make_trace([[[8, 0, 0, 0, 0, 0, 0, 0]], [[1, 0, 0, 0, 0, 0, 0, 0]]])
    recording = make_oracle(4, cost).replay(trace)
    assert recording.layer_s_SL.ravel().tolist() == [1 + 2 * 10 + 2, 1 + 10 + 1]
    assert recording.device_tokens_SLD[:, 0].tolist() == [[2, 2, 2, 2], [1, 0, 0, 0]]


def test_steps_wait_for_their_arrival_and_for_the_step_before():
    cost = LayerCost(token_s=1.0)
    trace = make_trace([[[4, 0]], [[4, 0]], [[0, 0]]], time_s=[5.0, 6.0, 100.0])
    recording = make_oracle(2, cost, misc_s=0.5).replay(trace)
    assert recording.start_s_S.tolist() == [0.0, 2.5, 95.0]
    assert recording.end_s == 95.0
    assert recording.resident_gb_s_S.tolist() == [0.0, 5.0, 190.0, 190.0]
    assert recording.warm_SL.tolist() == [[2], [2], [2]]
    assert recording.replicas_SLED is None
