"""Loads that would give a wrong plan are refused in one line that says why."""

import json

import numpy as np
import pytest
from load_files import LOADS, capture, no_torch, write_statistics

from moeless.errors import TraceError
from moeless.workloads.formats.expert_loads import Declared
from moeless.workloads.formats.read import read_loads


def refused(path, match, **options):
    with pytest.raises(TraceError, match=match) as caught:
        read_loads(path, load_torch=no_torch, **options)
    assert "\n" not in str(caught.value)


def write_csv(path, loads):
    path.write_text("\n".join(",".join(str(x) for x in row) for row in loads))
    return path


def write_sglang(path, **data):
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
def test_a_value_that_is_no_count_names_layer_and_expert(tmp_path, value):
    path = write_csv(tmp_path / "l.csv", [[1, 2], [3, value]])
    refused(path, "layer 1, expert 1: load .* is not a token count")


def test_a_negative_or_nan_count_in_steps_names_the_step(tmp_path):
    array = np.ones((2, 2, 4), dtype=np.float32)
    array[1, 0, 2] = np.nan
    np.save(tmp_path / "n.npy", array)
    refused(tmp_path / "n.npy", "step 1, layer 0, expert 2: load nan")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty"),
        (b"a,b\n", "no rows"),
        (b"1,2\n3\n", "line 2 has 1 cells"),
        (b"1,2\n3,x\n", "'x' is not a number"),
        (b"{", "not JSON"),
        (b"[1, 2]", r"shape \(2,\), expected \[layers, experts\]"),
        (b"{}", "expected logical_count"),
        (b"\x93NUMPY\x01\x00", "damaged .npy"),
        (b"PK\x03\x04 and no more", "damaged archive"),
        (b"\x00\x01\x02", "no known format"),
        (b"\x80\x04}\x94.", "a pickle"),
    ],
)
def test_a_damaged_or_foreign_file(tmp_path, content, match):
    (tmp_path / "f").write_bytes(content)
    refused(tmp_path / "f", match)


def test_a_missing_file_and_a_foreign_directory(tmp_path):
    refused(tmp_path / "none", "no such file")
    refused(tmp_path, "without meta_info.json")


def test_an_object_array_is_not_unpickled(tmp_path):
    np.save(tmp_path / "o.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    refused(tmp_path / "o.npy", "pickled objects")


def test_one_ranks_experts_are_a_partial_dump(tmp_path):
    loads = np.zeros((3, 16), dtype=int)
    loads[:, 4:8] = [[90, 2, 3, 40], [5, 80, 30, 2], [9, 0, 70, 8]]
    path = write_csv(tmp_path / "l.csv", loads)
    refused(path, "partial dump: in all 3 layers .* experts 4 to 7 of 16 .* one rank of 4")
    assert read_loads(path, load_torch=no_torch, allow_partial=True).num_experts == 16


def test_one_hot_expert_in_one_layer_is_no_partial_dump(tmp_path):
    path = write_csv(tmp_path / "l.csv", [[800, 0, 0, 0, 0, 0, 0, 0]])
    assert read_loads(path, load_torch=no_torch).loads_LE.sum() == 800


def test_a_missing_rank_is_a_partial_dump(tmp_path):
    write_statistics(tmp_path / "s", {0: {"1_0": LOADS[0]}, 2: {"1_0": LOADS[0]}})
    refused(tmp_path / "s", r"partial dump: rank1\.safetensors is missing")


def test_a_missing_iteration_of_a_layer(tmp_path):
    tensors = {"1_0": LOADS[0], "1_1": LOADS[1], "2_0": LOADS[0]}
    write_statistics(tmp_path / "s", {0: tensors})
    refused(tmp_path / "s", "iteration 2 has no layer 1")


def test_missing_layers_by_their_ids(tmp_path):
    write_statistics(tmp_path / "s", {0: {f"1_{i}": LOADS[0] for i in range(43) if i % 20 != 7}})
    refused(
        tmp_path / "s", "layers missing: 41 of 43 layers between 0 and 42 are there, not 7, 27"
    )


def test_every_second_layer_is_no_gap(tmp_path):
    write_statistics(tmp_path / "s", {0: {f"1_{i}": LOADS[0] for i in (1, 3, 5)}})
    assert read_loads(tmp_path / "s", load_torch=no_torch).layer_ids == (1, 3, 5)


def test_missing_layers_by_the_model(tmp_path):
    path = write_sglang(tmp_path / "d.json", logical_count=np.tile(LOADS, (20, 1)).tolist())
    declared = Declared(num_layers=43, origin="--layers")
    refused(path, "layers missing or too many: 40 layers, --layers has 43", declared=declared)


def test_layers_without_tokens_in_the_middle_or_at_the_end_are_missing(tmp_path):
    for empty in (slice(5, 7), slice(17, 20)):
        counts = np.tile(LOADS, (10, 1))
        counts[empty] = 0
        path = write_sglang(tmp_path / "d.json", logical_count=counts.tolist())
        refused(path, "layers missing")


def test_columns_of_slots_are_not_experts(tmp_path):
    path = write_csv(tmp_path / "l.csv", LOADS)
    refused(path, "physical slots", declared=Declared(num_experts=3, origin="--experts"))
    refused(path, "4 of the 8 experts", declared=Declared(num_experts=8, origin="--experts"))
    path = write_sglang(
        tmp_path / "d.json",
        logical_count=LOADS.tolist(),
        physical_to_logical_map=[[0, 1, 2, 0], [0, 1, 2, 1]],
    )
    refused(path, "one per physical slot, but the map names 3 logical experts")
    write_statistics(tmp_path / "s", {0: {"1_0": [1, 2, 3, 4, 5, 6]}})
    refused(tmp_path / "s", "6 counts for 4 experts: physical slots")


def test_physical_ids_are_not_experts(tmp_path):
    np.save(tmp_path / "r.npy", capture())
    refused(tmp_path / "r.npy", "ids of physical slots", declared=Declared(num_experts=6))
    refused(tmp_path / "r.npy", "give --experts or --model")


def test_per_pass_records_and_placements_are_not_loads(tmp_path):
    refused(write_sglang(tmp_path / "r.json", records=[]), "one rank's counts of physical experts")
    path = write_sglang(tmp_path / "p.json", physical_to_logical_map=[[0, 1]])
    refused(path, "a placement .* not loads")


def test_dummy_tokens_in_ids(tmp_path):
    ids = capture()
    ids[3:5] = 0
    np.save(tmp_path / "r.npy", ids)
    refused(
        tmp_path / "r.npy",
        r"token 3 of 40: the same id 2 times over.*warm-up dummy \(2 such tokens\)",
        declared=Declared(num_experts=8),
    )


def test_dummy_tokens_in_steps(tmp_path):
    counts = np.tile(LOADS, (3, 1, 1))
    counts[1] = [[64, 64, 0, 0], [0, 64, 0, 64]]
    path = write_sglang(tmp_path / "d.json", logical_count=counts.tolist())
    refused(path, "step 1: all 64 tokens go to the same 2 experts in every layer.*warm-up")


def test_ids_that_repeat_within_a_token_show_in_the_sums(tmp_path):
    write_statistics(tmp_path / "s", {0: {"1_0": [90, 2, 3, 5], "1_1": [20, 30, 25, 25]}})
    refused(tmp_path / "s", "layer 0, expert 0: counted 90 times, but only 50 tokens chose 2")


def test_a_truncated_safetensors_file(tmp_path):
    write_statistics(tmp_path / "s", {0: {"1_0": LOADS[0]}})
    file = tmp_path / "s" / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refused(tmp_path / "s", "damaged safetensors file")
    file.write_bytes(b"\xff" * 16)
    refused(tmp_path / "s", "cut short")


def test_a_damaged_pt_file(tmp_path):
    torch = pytest.importorskip("torch")
    from moeless.bootstrap.placements.torch_file import load_torch_file

    path = tmp_path / "d.pt"
    torch.save({"logical_count": torch.ones(1, 2, 4)}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"logical_count", b"logical\xff\xffount"))
    with pytest.raises(TraceError, match=r"d\.pt"):
        read_loads(path, load_torch=load_torch_file)
