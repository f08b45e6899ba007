"""Placements survive a round trip through every format that can hold them."""

import json

import numpy as np
import pytest

from moeless.errors import ConfigError, TraceError
from moeless.workloads.formats.placements.moeless_json import format_placement, read_placement
from moeless.workloads.formats.placements.placement import Placement
from moeless.workloads.formats.placements.read import read_any_placement
from moeless.workloads.formats.placements.sglang_map import format_sglang_map, read_sglang_map
from moeless.workloads.formats.placements.trtllm_yaml import format_trtllm_yaml, read_trtllm_yaml

DEVICES = 2


def even_placement(layer_ids=(0, 1)):
    """Three slots on each of two devices, four experts."""
    replicas = np.zeros((2, 4, 2), dtype=np.uint8)
    replicas[0, [0, 1, 3], 0] = replicas[0, [0, 2, 3], 1] = 1
    replicas[1, [0, 2, 3], 0] = replicas[1, [1, 2, 3], 1] = 1
    return Placement(layer_ids=layer_ids, replicas_LED=replicas)


def uneven_placement():
    replicas = np.zeros((1, 3, 2), dtype=np.uint8)
    replicas[0, [0, 1], 0] = replicas[0, 2, 1] = 1
    return Placement(layer_ids=(4,), replicas_LED=replicas)


def same(a, b):
    return a.layer_ids == b.layer_ids and (a.replicas_LED == b.replicas_LED).all()


@pytest.mark.parametrize("placement", [even_placement((3, 5)), uneven_placement()])
def test_our_json_round_trips_even_and_uneven_placements(tmp_path, placement):
    path = tmp_path / "p.json"
    path.write_text(format_placement(placement, report={"policy": "x"}))
    assert same(read_placement(path), placement)
    assert same(read_any_placement(path, num_devices=DEVICES), placement)
    assert json.loads(path.read_text())["version"] == 1


def test_sglang_json_round_trips(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(format_sglang_map(even_placement()))
    rows = json.loads(path.read_text())["physical_to_logical_map"]
    assert rows == [[0, 1, 3, 0, 2, 3], [0, 2, 3, 1, 2, 3]]
    assert same(read_sglang_map(path, num_devices=DEVICES), even_placement())
    assert same(read_any_placement(path, num_devices=DEVICES), even_placement())


def test_dense_layers_have_trivial_rows_in_sglang_json():
    rows = json.loads(format_sglang_map(even_placement((2, 4))))["physical_to_logical_map"]
    assert len(rows) == 5
    assert rows[0] == rows[3] == [0, 1, 2, 3, 0, 1]
    assert rows[2] == [0, 1, 3, 0, 2, 3]


def test_trtllm_yaml_round_trips_with_absolute_layers(tmp_path):
    path = tmp_path / "moe_load_balancer.yaml"
    path.write_text(format_trtllm_yaml(even_placement((3, 4)), layer_updates_per_iter=2))
    assert same(read_trtllm_yaml(path, num_devices=DEVICES), even_placement((3, 4)))
    assert same(read_any_placement(path, num_devices=DEVICES), even_placement((3, 4)))


def test_trtllm_yaml_is_what_a_yaml_library_reads():
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(format_trtllm_yaml(even_placement((3, 4)))) == {
        "initial_global_assignments": {3: [0, 1, 3, 0, 2, 3], 4: [0, 2, 3, 1, 2, 3]},
        "num_slots": 6,
        "layer_updates_per_iter": 0,
    }


@pytest.mark.parametrize("style", [None, False])
def test_what_a_yaml_library_writes_is_read(tmp_path, style):
    yaml = pytest.importorskip("yaml")
    path = tmp_path / "b.yaml"
    config = yaml.safe_load(format_trtllm_yaml(even_placement((3, 4))))
    path.write_text(yaml.dump(config, default_flow_style=style, width=20))
    assert same(read_trtllm_yaml(path, num_devices=DEVICES), even_placement((3, 4)))


@pytest.mark.parametrize("write", [format_sglang_map, format_trtllm_yaml])
def test_uneven_slots_are_refused_where_the_format_cannot_hold_them(write):
    with pytest.raises(ConfigError, match=r"same number of slots .* 2 on device 0 .* device 1"):
        write(uneven_placement())


def test_two_slots_of_a_device_with_one_expert_count_once(tmp_path):
    path = tmp_path / "map.json"
    path.write_text('{"physical_to_logical_map": [[0, 0, 1, 2]]}')
    placement = read_sglang_map(path, num_devices=2)
    assert placement.replicas_LED[0].tolist() == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"physical_to_logical_map": [[0, 1, 2]]}', "3 slots are not divided by 2 devices"),
        ('{"physical_to_logical_map": [[0, 2, 2, 2]]}', "expert 1 is on no device"),
        ('{"physical_to_logical_map": [[0, 9]]}', "expert ids from 0 to 9 in 2 slots"),
        ('{"physical_to_logical_map": [[0, 1], [0]]}', "expected one number"),
        ('{"physical_to_logical_map": 3}', "has no physical_to_logical_map"),
        ('{"format": "moeless-placement", "version": 2}', "reads version 1"),
        ('{"format": "moeless-placement", "version": 1}', "num_experts is None"),
        ('{"a": 1}', "no placement"),
        ("num_slots: 4\nlayer_updates_per_iter: 2\n", "no initial_global_assignments"),
        ("num_slots: 5\ninitial_global_assignments:\n  3: [0, 1]\n", "num_slots is 5"),
        ("slots: 5\n", "unknown key slots"),
        ("a: &b !!python/object {}\n", "line 1: cannot read"),
        ("", "empty"),
    ],
)
def test_a_damaged_placement_says_what_is_wrong(tmp_path, text, match):
    path = tmp_path / "p"
    path.write_text(text)
    with pytest.raises(TraceError, match=match):
        read_any_placement(path, num_devices=DEVICES)


def test_a_placement_of_other_devices_is_refused(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(format_placement(uneven_placement()))
    with pytest.raises(TraceError, match="on 2 devices, but --devices is 8"):
        read_any_placement(path, num_devices=8)
