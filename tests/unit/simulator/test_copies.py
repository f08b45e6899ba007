"""EPLB in a replay is the original: two slots with one expert take two shares and two places."""

import numpy as np
import pytest

from fakes.replays import COST, EXPERT, make_trace, run
from moeless.core.layer_cost import LayerCost
from moeless.simulator.metrics import MetricsConfig, measure_policy

ONE_HOT = [800, 0, 0, 0, 0, 0, 0, 0]
TWO_HOT = [500, 300, 10, 10, 10, 10, 10, 10]
SKEWED = [420, 390, 180, 120, 90, 60, 50, 40]


def replay(load_E, name="eplb", **options):
    """Forty steps of one load, of which the last were planned from it."""
    # A multiple of all numbers of copies: shares are whole tokens, as in the original.
    trace = make_trace(np.tile(np.array(load_E) * 2520, (40, 1, 1)))
    return trace, run(trace, name, devices=8, **options)


@pytest.mark.parametrize(
    ("load_E", "balancedness"), [(ONE_HOT, 0.563), (TWO_HOT, 0.717), (SKEWED, 0.900)]
)
def test_balancedness_is_that_of_the_original_where_it_repeats_an_expert(load_E, balancedness):
    """Expected figures are mean / max GPU load of deepseek-ai/EPLB on 16 slots of 8 GPUs."""
    _, recording = replay(load_E)
    tokens_D = recording.device_tokens_SLD[-1, 0]
    assert tokens_D.mean() / tokens_D.max() == pytest.approx(balancedness, abs=5e-4)


def test_every_slot_counts_as_memory_and_every_instance_as_a_load():
    trace, recording = replay(TWO_HOT)
    held_ED = recording.replicas_SLED[-1, 0]
    assert held_ED.max() == 2
    assert held_ED.sum(axis=0).tolist() == [2] * 8
    assert recording.warm_SL.ravel().tolist() == [16] * 40
    assert not recording.blocking_SL.any()
    before_ED, gone_ED = recording.replicas_SLED[0, 0] > 0, held_ED == 0
    assert recording.cold_SL.sum() == np.count_nonzero(~before_ED & ~gone_ED)
    figures = measure_policy(
        recording,
        trace.loads_NLE,
        config=MetricsConfig(
            cost=COST,
            num_devices=8,
            device_bytes=9 * EXPERT.num_bytes,
            function_bytes=EXPERT.num_bytes,
            serverless=False,
        ),
    )
    assert figures["memory_factor"] == 2.0
    assert figures["replicas_per_layer"] == {"mean": 16.0, "max": 16}


def test_an_explanation_names_a_device_once_per_copy():
    _, recording = replay(ONE_HOT, explain=(39, 0))
    planned, warm = recording.explanation["planned"][0], recording.explanation["warm"][0]
    assert len(planned) == 9
    assert warm == sorted(set(planned)) == list(range(8))


def test_a_policy_without_repeated_slots_counts_every_instance_once():
    _, recording = replay(ONE_HOT, "swift")
    assert recording.replicas_SLED.max() == 1


@pytest.mark.parametrize("name", ["static", "eplb", "swift", "paper", "moeless"])
def test_an_expert_is_touched_once_per_device_however_many_copies_it_has_there(name):
    """Weights are on a device once and are read once: the same rule for every policy."""
    cost = LayerCost(base_s=0.5, touch_s=2.0, token_s=1e-3, transfer_s=1e-4)
    _, recording = replay(ONE_HOT, name, cost=cost)
    if name == "eplb":
        assert recording.replicas_SLED[-1, 0, 0].max() == 2  # it is this policy that repeats
    tokens_SD = recording.device_tokens_SLD[:, 0]
    busy_SD = np.where(tokens_SD > 0, 0.5 + 2.0 + 1e-3 * tokens_SD, 0.0)
    layer_S = busy_SD.max(axis=1) + 2e-4 * tokens_SD.max(axis=1)
    assert recording.layer_s_SL[:, 0] == pytest.approx(layer_S, rel=1e-12)
    assert recording.busy_s_SL[:, 0] == pytest.approx(busy_SD.sum(axis=1), rel=1e-12)
