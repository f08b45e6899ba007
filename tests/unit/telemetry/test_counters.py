import json

import numpy as np
import pytest

from moeless.telemetry.counters import LayerStats


def record(stats, layer, count, device_tokens):
    stats.record_split(layer, count_E=np.array(count), device_tokens_D=np.array(device_tokens))


def test_tokens_add_up_per_expert_and_device():
    stats = LayerStats(num_layers=2, num_experts=3, num_devices=2)
    record(stats, 1, [1, 2, 3], [4, 2])
    record(stats, 1, [1, 0, 0], [0, 1])
    assert stats.tokens_LE.tolist() == [[0, 0, 0], [2, 2, 3]]
    assert stats.device_tokens_LD.tolist() == [[0, 0], [4, 3]]


def test_the_straggler_ratio_is_max_over_the_rounded_up_mean():
    stats = LayerStats(num_layers=1, num_experts=2, num_devices=2)
    record(stats, 0, [4, 1], [4, 1])  # mean 2.5, rounded up 3
    record(stats, 0, [1, 1], [1, 1])
    assert stats.straggler_last_L.tolist() == [1.0]
    assert stats.straggler_mean_L.tolist() == pytest.approx([(4 / 3 + 1) / 2])


def test_static_parallelism_is_judged_on_the_same_loads():
    stats = LayerStats(num_layers=1, num_experts=5, num_devices=2)
    record(stats, 0, [4, 1, 1, 0, 2], [4, 4])  # blocks of 3 and 2 experts: 6 and 2 tokens
    record(stats, 0, [0, 0, 0, 1, 1], [1, 1])  # 0 and 2
    assert stats.straggler_mean_L.tolist() == [1.0]
    assert stats.straggler_static_mean_L.tolist() == pytest.approx([(6 / 4 + 2 / 1) / 2])


def test_devices_that_static_parallelism_leaves_empty_do_not_count():
    stats = LayerStats(num_layers=1, num_experts=2, num_devices=4)
    record(stats, 0, [4, 4], [2, 2, 2, 2])
    assert stats.straggler_static_mean_L.tolist() == [2.0]


def test_a_step_without_tokens_is_left_out():
    stats = LayerStats(num_layers=1, num_experts=2, num_devices=2)
    record(stats, 0, [0, 0], [0, 0])
    assert stats.layer_steps_L.tolist() == [0]
    assert np.isnan(stats.straggler_mean_L).all()


def test_warm_starts_are_counted():
    stats = LayerStats(num_layers=2, num_experts=2, num_devices=1)
    stats.record_warm_starts(0, 3)
    stats.record_warm_starts(1, 1)
    assert stats.warm_starts == 4
    assert stats.warm_starts_L.tolist() == [3, 1]


def test_what_is_read_is_a_copy():
    stats = LayerStats(num_layers=1, num_experts=1, num_devices=1)
    stats.tokens_LE[0, 0] = 5
    stats.straggler_last_L[0] = 5
    assert stats.tokens_LE.tolist() == [[0]]
    assert np.isnan(stats.straggler_last_L[0])


def test_the_dictionary_is_strict_json():
    stats = LayerStats(num_layers=1, num_experts=2, num_devices=1)
    assert json.loads(json.dumps(stats.to_dict(), allow_nan=False)) == {
        "layer_steps": [0],
        "tokens": [[0, 0]],
        "device_tokens": [[0]],
        "straggler_mean": [None],
        "straggler_last": [None],
        "straggler_static": [None],
        "warm_starts": [0],
    }


def test_ratios_are_over_the_devices_in_use():
    stats = LayerStats(num_layers=1, num_experts=4, num_devices=6)
    stats.record_split(
        0, count_E=np.array([3, 1, 1, 1]), device_tokens_D=np.array([4, 2, 0]), in_use=2
    )
    assert stats.straggler_last_L.tolist() == [4 / 3]
    assert stats.straggler_static_mean_L.tolist() == [4 / 3]  # blocks of two experts
    assert stats.device_tokens_LD.tolist() == [[4, 2, 0, 0, 0, 0]]


def test_a_device_that_had_tokens_counts_although_it_has_just_left():
    stats = LayerStats(num_layers=1, num_experts=2, num_devices=3)
    stats.record_split(0, count_E=np.array([2, 2]), device_tokens_D=np.array([2, 2]), in_use=1)
    assert stats.straggler_last_L.tolist() == [1.0]
