"""Every load format is told by its content and read as tokens per layer and logical expert."""

import json

import numpy as np
import pytest
from load_files import LOADS, capture, no_torch, write_statistics

from moeless.errors import ConfigError, TraceError
from moeless.workloads.formats.detect import detect_format
from moeless.workloads.formats.expert_loads import Declared
from moeless.workloads.formats.read import read_loads
from moeless.workloads.routing_trace import RoutingTrace, TraceMeta, write_trace


def read(path, **options):
    return read_loads(path, load_torch=no_torch, **options)


def test_a_routing_trace_is_summed_over_its_steps(tmp_path):
    meta = TraceMeta(
        model="m",
        num_layers=2,
        num_experts=4,
        top_k=2,
        layer_ids=(1, 3),
        unit="steps",
        phase="prefill",
        source="test",
        licence="CC0",
    )
    trace = RoutingTrace(
        meta=meta,
        loads_NLE=np.stack([LOADS, LOADS]).astype(np.uint32),
        tokens_N=np.array([6, 6], dtype=np.int32),
        time_s_N=np.array([0.0, 1.0]),
    )
    write_trace(trace, tmp_path / "trace.bin")
    loads = read(tmp_path / "trace.bin")
    assert (loads.loads_LE == 2 * LOADS).all()
    assert (loads.layer_ids, loads.steps, loads.top_k) == ((1, 3), 2, 2)


@pytest.mark.parametrize("steps", [True, False])
def test_an_sglang_json_may_have_steps_or_not(tmp_path, steps):
    counts = [LOADS.tolist(), LOADS.tolist(), np.zeros_like(LOADS).tolist()]
    path = tmp_path / "dump"
    path.write_text(json.dumps({"logical_count": counts if steps else LOADS.tolist()}))
    assert detect_format(path) == "sglang"
    loads = read(path)
    assert (loads.loads_LE == (2 if steps else 1) * LOADS).all()
    assert loads.steps == (2 if steps else 1), "steps that the ring has not reached do not count"


def test_dense_layers_of_an_sglang_dump_are_left_out_and_ids_stay_absolute(tmp_path):
    counts = np.concatenate([np.zeros((1, 4), int), np.tile(LOADS, (4, 1))])
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"logical_count": counts.tolist()}))
    loads = read(path)
    assert loads.layer_ids == tuple(range(1, 9))
    assert (loads.loads_LE == counts[1:]).all()


def test_an_sglang_dump_is_read_with_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from moeless.bootstrap.placements.torch_file import load_torch_file

    path = tmp_path / "expert_distribution_recorder_1.pt"
    counts = torch.tensor(np.stack([LOADS, LOADS]), dtype=torch.int32)
    torch.save({"rank": 0, "logical_count": counts, "average": None}, path)
    assert detect_format(path) == "sglang"
    loads = read_loads(path, load_torch=load_torch_file)
    assert (loads.loads_LE == 2 * LOADS).all()


def test_a_pt_file_with_code_in_it_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    from moeless.bootstrap.placements.torch_file import load_torch_file

    path = tmp_path / "evil.pt"
    torch.save({"logical_count": pytest.importorskip}, path)
    with pytest.raises(TraceError, match="could run code"):
        read_loads(path, load_torch=load_torch_file)


def test_trtllm_statistics_add_up_over_ranks_and_iterations(tmp_path):
    tensors = {f"{i}_{layer}": LOADS[row] for i in (50, 51) for row, layer in enumerate((3, 4))}
    write_statistics(tmp_path / "s", {0: tensors, 1: tensors})
    (tmp_path / "s" / "rank0_raw.safetensors").write_bytes(b"not looked at")
    assert detect_format(tmp_path / "s") == "trtllm"
    loads = read(tmp_path / "s")
    assert (loads.loads_LE == 4 * LOADS).all()
    assert (loads.layer_ids, loads.steps, loads.top_k) == ((3, 4), 2, 2)


def test_trtllm_statistics_agree_with_the_safetensors_library(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    write_statistics(tmp_path / "s", {})
    library.save_file(
        {"7_0": LOADS[0].astype(np.int64), "7_1": LOADS[1].astype(np.int64)},
        tmp_path / "s" / "rank0.safetensors",
    )
    assert (read(tmp_path / "s").loads_LE == LOADS).all()


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32])
def test_a_vllm_capture_is_counted(tmp_path, dtype):
    ids = capture()
    np.save(tmp_path / "routed.npy", ids.astype(dtype))
    assert detect_format(tmp_path / "routed.npy") == "vllm"
    loads = read(tmp_path / "routed.npy", declared=Declared(num_experts=8))
    expected = [np.bincount(ids[:, layer].ravel(), minlength=8) for layer in range(3)]
    assert (loads.loads_LE == np.stack(expected)).all()
    assert loads.top_k == 2


def test_prompt_and_completion_of_a_vllm_capture_add_up_without_cached_tokens(tmp_path):
    ids = capture()
    cached = np.full((5, 3, 2), -1, dtype=np.int16)
    np.savez(
        tmp_path / "r.npz",
        routed_experts=ids,
        prompt_routed_experts=np.concatenate([cached, ids]),
    )
    assert detect_format(tmp_path / "r.npz") == "vllm"
    loads = read(tmp_path / "r.npz", declared=Declared(num_experts=8))
    assert loads.loads_LE.sum() == 2 * ids.size


def test_a_dense_layer_of_a_vllm_capture_is_left_out(tmp_path):
    ids = np.concatenate([capture()] * 2, axis=1)
    ids[:, 0] = 0
    np.save(tmp_path / "r.npy", ids)
    loads = read(tmp_path / "r.npy", declared=Declared(num_experts=8))
    assert loads.layer_ids == (1, 2, 3, 4, 5)


def test_a_moe_infinity_trace_is_summed_over_its_sequences(tmp_path):
    array = np.zeros((5, 2, 4), dtype=np.float32)
    array[:3] = LOADS
    np.save(tmp_path / "trace.npy", array)
    assert detect_format(tmp_path / "trace.npy") == "moe-infinity"
    loads = read(tmp_path / "trace.npy")
    assert (loads.loads_LE == 3 * LOADS).all()
    assert loads.loads_LE.dtype == np.int64
    assert loads.steps == 3


@pytest.mark.parametrize("counts", [(400, 1200), (20, 90), (0, 12)])
def test_counts_of_experts_are_not_taken_for_ids(tmp_path, counts):
    rng = np.random.default_rng(0)
    tokens = rng.integers(*counts, (300, 1, 1)) * 8
    array = rng.multinomial(tokens[:, 0], np.full((32, 8), 1 / 8)).astype(np.int32)
    np.save(tmp_path / "trace.npy", array)
    assert detect_format(tmp_path / "trace.npy") == "moe-infinity"
    assert (read(tmp_path / "trace.npy").loads_LE == array.sum(axis=0)).all()
    np.save(tmp_path / "uneven.npy", rng.integers(400, 1200, (300, 32, 8)))
    assert detect_format(tmp_path / "uneven.npy") == "moe-infinity"
    np.save(tmp_path / "small.npy", rng.integers(0, 90, (300, 32, 8)))
    assert detect_format(tmp_path / "small.npy", num_experts=8) == "moe-infinity"


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 1), (256, 8), (512, 10)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_ids_of_experts_are_not_taken_for_counts(tmp_path, experts, top_k, tokens):
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((tokens, 5, experts)), axis=2)[:, :, :top_k]
    np.save(tmp_path / "ids.npy", ids)
    for known in (None, experts):
        assert detect_format(tmp_path / "ids.npy", num_experts=known) == "vllm"
    loads = read(tmp_path / "ids.npy", declared=Declared(num_experts=experts))
    assert loads.loads_LE.sum() == ids.size


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.float32])
def test_a_bare_matrix_is_layers_by_experts(tmp_path, dtype):
    np.save(tmp_path / "loads.npy", LOADS.astype(dtype))
    assert detect_format(tmp_path / "loads.npy") == "array"
    assert (read(tmp_path / "loads.npy").loads_LE == LOADS).all()
    (tmp_path / "loads.json").write_text(json.dumps(LOADS.tolist()))
    loads = read(tmp_path / "loads.json")
    assert (loads.loads_LE == LOADS).all()
    assert loads.source == "loads.json (array)"


@pytest.mark.parametrize("shape", [(4,), (), (1, 1, 2, 4)])
def test_an_array_of_another_shape_is_refused(tmp_path, shape):
    np.save(tmp_path / "loads.npy", np.ones(shape, dtype=int))
    with pytest.raises(TraceError, match=r"shape \(.*\), expected \[layers, experts\]"):
        read(tmp_path / "loads.npy")


@pytest.mark.parametrize("steps", [1, 3])
def test_a_bare_tensor_is_loads_too(tmp_path, steps):
    torch = pytest.importorskip("torch")
    from moeless.bootstrap.placements.torch_file import load_torch_file

    tensor = torch.tensor(LOADS if steps == 1 else np.stack([LOADS] * steps))
    torch.save(tensor, tmp_path / "loads.pt")
    loads = read_loads(tmp_path / "loads.pt", load_torch=load_torch_file)
    assert (loads.loads_LE == steps * LOADS).all()
    torch.save("text", tmp_path / "text.pt")
    with pytest.raises(TraceError, match="holds no array of numbers"):
        read_loads(tmp_path / "text.pt", load_torch=load_torch_file)


def window(load, slots, **more):
    record = {"record_type": "eplb_load_stats", "version": 1, "step": 7, "num_ranks": 2}
    return record | {"expert_load": load, "p2l_map": slots} | more


def write_windows(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_vllm_load_statistics_are_summed_over_slots_and_windows(tmp_path):
    path = write_windows(
        tmp_path / "stats.jsonl",
        {"record_type": "eplb_load_meta", "version": 1, "num_layers": 2},
        window([[10, 1, 5, 2], [2, 8, 1, 3]], [[0, 1, 2, 3], [0, 1, 2, 3]], step=9),
        window([[10, 1, 5, 2, 4], [2, 8, 1, 3, 0]], [[0, 1, 2, 3, 0], [3, 2, 1, 0, -1]], step=7),
    )
    assert detect_format(path) == "vllm-stats"
    path.write_text(path.read_text().replace("\n", "\n\n"))
    loads = read(path)
    assert loads.loads_LE.tolist() == [[24, 2, 10, 4], [5, 9, 9, 5]]
    assert (loads.layer_ids, loads.steps) == ((0, 1), 2)


MAP = [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (window([[1, 2]], MAP), "does not go with expert_load"),
        (window([[1, 2], [3]], MAP), "unequal length"),
        (window([[1, 2], [3, -4]], MAP), "no token count"),
        (window([[1, 2], [3, 4]], [[0, 2], [2, 0]]), "layer 0 has no slot of expert 1"),
        (window([[1, 2], [3, 4]], [[0, 1], [0, 0]]), "layer 1 has no slot of expert 1"),
        (window([[1, 2, 3], [3, 4, 0]], [[0, 1, -1], [0, 1, -1]]), "without an expert .* tokens"),
        (window([[1, 2], [3, 4]], MAP, version=2), "version 2; known is 1"),
        (window([[1, 2, 3], [3, 4, 5]], [[0, 1, 2], [0, 1, 2]]), "2 layers of 3 experts after 2"),
        (window([[9, 2], [3, 4]], MAP), "the same as line 1"),
        ({"step": 3}, "no record_type"),
    ],
)
def test_a_window_of_vllm_that_does_not_fit_names_its_line(tmp_path, record, match):
    first = window([[9, 2], [3, 4]], MAP)
    path = write_windows(tmp_path / "stats.jsonl", first, record)
    with pytest.raises(TraceError, match=f"line 2.*{match}"):
        read(path)


def test_a_last_line_that_is_cut_is_told_so(tmp_path):
    path = write_windows(tmp_path / "s.jsonl", *[window([[9, 2], [3, 4]], MAP)] * 2)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(TraceError, match="line 2 is not JSON: the file ends within it; delete"):
        read(path)
    write_windows(path, {"record_type": "eplb_load_meta"})
    with pytest.raises(TraceError, match="no record of type eplb_load_stats"):
        read(path)


@pytest.mark.parametrize(
    ("text", "layer_ids"),
    [
        ("5,1,2,4\n3,3,0,6\n", (0, 1)),
        ("e0,e1,e2,e3\n5,1,2,4\n\n3,3,0,6\n", (0, 1)),
        ("# measured\nlayer;a;b;c;d\n4;5;1;2;4\n6;3;3;0;6\n", (4, 6)),
        ("\ufeff5\t1\t2\t4\n3\t3\t0\t6", (0, 1)),
    ],
)
def test_a_csv_table_needs_no_header(tmp_path, text, layer_ids):
    path = tmp_path / "loads.txt"
    path.write_text(text, "utf8")
    assert detect_format(path) == "csv"
    loads = read(path)
    assert (loads.loads_LE == LOADS).all()
    assert loads.layer_ids == layer_ids


def test_fractions_in_a_csv_table_are_kept(tmp_path):
    (tmp_path / "l.csv").write_text("0.5,0.25\n")
    assert read(tmp_path / "l.csv").loads_LE.tolist() == [[0.5, 0.25]]


def test_the_format_may_be_named(tmp_path):
    (tmp_path / "l.csv").write_text("1,2\n")
    assert read(tmp_path / "l.csv", format_name="csv").num_experts == 2
    with pytest.raises(TraceError, match="not JSON"):
        read(tmp_path / "l.csv", format_name="sglang")
    with pytest.raises(TraceError, match="is a directory"):
        read(tmp_path / "l.csv", format_name="trtllm")
    with pytest.raises(ConfigError, match="known are: trace, sglang"):
        read(tmp_path / "l.csv", format_name="xml")
