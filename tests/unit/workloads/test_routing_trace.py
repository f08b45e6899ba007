"""What a routing trace accepts, and how it refuses everything else."""

import json
import os
import struct
import zipfile

import numpy as np
import pytest
from trace_makers import as_arrays, assert_same, make_meta, make_trace, with_meta

from moeless.errors import TraceError
from moeless.workloads.routing_trace import RoutingTrace, read_trace, write_trace


def save(path, arrays):
    np.savez(path, **arrays)
    return path


def refusal(path):
    """The one line with which a file is refused."""
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def refusal_of(tmp_path, arrays):
    return refusal(save(tmp_path / "broken.npz", arrays))


@pytest.mark.parametrize(
    "trace",
    [make_trace(), make_trace(unit="requests"), make_trace(full=True), make_trace(tokens=[0, 2])],
    ids=["steps", "requests", "full", "an empty step"],
)
def test_what_is_written_is_read_back(tmp_path, trace):
    write_trace(trace, tmp_path / "trace.npz")
    again = read_trace(tmp_path / "trace.npz")
    assert_same(trace, again)
    assert again.loads_NLE.dtype == np.uint32
    assert len(again) == len(trace.tokens_N)


def test_unknown_keys_of_the_meta_document_are_kept(tmp_path):
    arrays = with_meta(as_arrays(make_trace()), capture={"host": "a", "ranks": [0, 1]})
    trace = read_trace(save(tmp_path / "a.npz", arrays))
    assert trace.meta.extra == {"capture": {"host": "a", "ranks": [0, 1]}}
    write_trace(trace, tmp_path / "b.npz")
    assert read_trace(tmp_path / "b.npz").meta == trace.meta


def test_arrays_that_the_format_does_not_know_are_ignored(tmp_path):
    arrays = {**as_arrays(make_trace()), "notes": np.array([{"pickled": True}], dtype=object)}
    assert_same(read_trace(save(tmp_path / "a.npz", arrays)), make_trace())


def test_other_byte_orders_and_memory_layouts_are_read(tmp_path):
    arrays = as_arrays(make_trace(full=True))
    foreign = {
        name: np.asfortranarray(array.astype(array.dtype.newbyteorder(">")))
        for name, array in arrays.items()
        if name not in ("version", "meta")
    }
    trace = read_trace(save(tmp_path / "a.npz", {**arrays, **foreign}))
    assert_same(trace, make_trace(full=True))


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "no_suffix"
    target.write_text("old")
    write_trace(make_trace(), target)
    assert_same(read_trace(target), make_trace())
    assert [path.name for path in tmp_path.iterdir()] == ["no_suffix"]


def test_writing_where_it_is_impossible_says_so(tmp_path):
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(make_trace(), tmp_path / "missing" / "trace.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(make_trace(), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["version", "meta", "loads", "tokens", "time_s"])
def test_a_missing_array_is_named(tmp_path, name):
    arrays = as_arrays(make_trace())
    del arrays[name]
    assert f"{name} is missing" in refusal_of(tmp_path, arrays)


@pytest.mark.parametrize("present", ["topk_ids", "topk_offsets"])
def test_topk_ids_and_offsets_come_together(tmp_path, present):
    arrays = as_arrays(make_trace(full=True))
    missing = {"topk_ids": "topk_offsets", "topk_offsets": "topk_ids"}[present]
    del arrays[missing]
    assert f"{missing} is missing" in refusal_of(tmp_path, arrays)


WRONG_DTYPES = {
    "version": np.float64,
    "meta": "S2000",
    "loads": np.int64,
    "tokens": np.int64,
    "time_s": np.float32,
    "decode_tokens": np.uint32,
    "topk_ids": np.int32,
    "topk_offsets": np.int32,
    "group": "S20",
    "predicted": np.float64,
}


@pytest.mark.parametrize("name", WRONG_DTYPES)
def test_a_wrong_dtype_is_named(tmp_path, name):
    arrays = as_arrays(make_trace(full=True))
    arrays[name] = np.asarray(arrays[name]).astype(WRONG_DTYPES[name])
    message = refusal_of(tmp_path, arrays)
    assert name in message
    assert "store it as" in message


@pytest.mark.parametrize("name", WRONG_DTYPES)
def test_a_wrong_number_of_dimensions_is_named(tmp_path, name):
    arrays = as_arrays(make_trace(full=True))
    arrays[name] = np.asarray(arrays[name])[None]
    message = refusal_of(tmp_path, arrays)
    assert name in message
    assert "[" in message


@pytest.mark.parametrize("name", sorted(set(WRONG_DTYPES) - {"version", "meta", "loads"}))
def test_a_wrong_length_is_named(tmp_path, name):
    arrays = as_arrays(make_trace(full=True))
    arrays[name] = arrays[name][:-1]
    assert name in refusal_of(tmp_path, arrays)


def test_loads_of_another_model_do_not_fit_the_meta_document(tmp_path):
    arrays = with_meta(as_arrays(make_trace()), num_layers=3, layer_ids=[0, 1, 2])
    assert "loads has shape [3, 2, 4]; expected [any, 3, 4]" in refusal_of(tmp_path, arrays)


def test_a_trace_without_entries_is_refused():
    with pytest.raises(TraceError, match="loads has no steps"):
        RoutingTrace(
            meta=make_meta(),
            loads_NLE=np.zeros((0, 2, 4), dtype=np.uint32),
            tokens_N=np.zeros(0, dtype=np.int32),
            time_s_N=np.zeros(0),
        )


@pytest.mark.parametrize("version", [0, 2, -1, 2**40])
def test_other_versions_are_refused(tmp_path, version):
    arrays = {**as_arrays(make_trace()), "version": np.int64(version)}
    assert f"version is {version}" in refusal_of(tmp_path, arrays)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"text"', "[" * 100_000, "{'model': 1}"], ids=lambda t: t[:8]
)
def test_a_meta_document_that_is_no_json_object_is_refused(tmp_path, text):
    arrays = {**as_arrays(make_trace()), "meta": np.array(text)}
    assert "meta is" in refusal_of(tmp_path, arrays)


@pytest.mark.parametrize(
    "name",
    [
        "model",
        "num_layers",
        "num_experts",
        "top_k",
        "layer_ids",
        "unit",
        "phase",
        "source",
        "licence",
    ],
)
def test_a_missing_meta_field_is_named(tmp_path, name):
    arrays = with_meta(as_arrays(make_trace()), **{name: None})
    assert f"meta lacks {name}" in refusal_of(tmp_path, arrays)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"unit": "batches"}, "meta.unit is 'batches'; use 'steps' or 'requests'"),
        ({"unit": ["steps"]}, "meta.unit"),
        ({"model": ""}, "meta.model is ''"),
        ({"licence": 3}, "meta.licence is 3"),
        ({"num_layers": 0, "layer_ids": []}, "meta.num_layers is 0"),
        ({"num_experts": True}, "meta.num_experts is True"),
        ({"num_experts": 4.0}, "meta.num_experts is 4.0"),
        ({"num_experts": 40_000}, "ids are int16"),
        ({"top_k": 5}, "meta.top_k is 5, more than"),
        ({"top_k": -1}, "meta.top_k is -1"),
        ({"layer_ids": [0]}, "names 1 layers, but meta.num_layers is 2"),
        ({"layer_ids": [3, 1]}, "1 after 3"),
        ({"layer_ids": [1, 1]}, "1 after 1"),
        ({"layer_ids": [-1, 1]}, "meta.layer_ids is -1"),
        ({"layer_ids": ["0", "1"]}, "meta.layer_ids is '0'"),
        ({"layer_ids": {"0": 1}}, "meta.layer_ids"),
        ({"predictor": "gate"}, "meta.predictor is 'gate'"),
        ({"predictor": {"kind": "gate"}}, "meta.predictor lacks distance"),
        ({"predictor": {"kind": "", "distance": 1}}, "meta.predictor.kind"),
        ({"predictor": {"kind": "gate", "distance": -1}}, "meta.predictor.distance"),
    ],
)
def test_a_wrong_meta_field_is_named(tmp_path, changes, wanted):
    assert wanted in refusal_of(tmp_path, with_meta(as_arrays(make_trace()), **changes))


def test_meta_keys_that_would_hide_a_field_are_not_written(tmp_path):
    trace = make_trace()
    hiding = make_meta(extra={"top_k": 9})
    bad = RoutingTrace(
        meta=hiding,
        loads_NLE=trace.loads_NLE,
        tokens_N=trace.tokens_N,
        time_s_N=trace.time_s_N,
    )
    with pytest.raises(TraceError, match="'top_k', which is a field"):
        write_trace(bad, tmp_path / "a.npz")
    with pytest.raises(TraceError, match="cannot be written as JSON"):
        make_meta(extra={"host": object()}).to_json()


def test_the_first_layer_whose_loads_do_not_add_up_is_named(tmp_path):
    arrays = as_arrays(make_trace(entries=5, tokens=[3, 3, 3, 3, 3]))
    loads = arrays["loads"].copy()
    loads[2, 1, np.argmin(loads[2, 1])] += 1
    loads[4, 0, 0] += 1
    message = refusal_of(tmp_path, {**arrays, "loads": loads})
    assert "loads[n=2, l=1] sums to 7, but tokens[2] x top_k is 3 x 2 = 6" in message


def test_an_expert_with_more_tokens_than_there_are_is_named(tmp_path):
    arrays = as_arrays(make_trace(tokens=[3, 3]))
    loads = arrays["loads"].copy()
    loads[1, 0] = [0, 4, 2, 0]
    message = refusal_of(tmp_path, {**arrays, "loads": loads})
    assert "loads[n=1, l=0]: expert 1 has 4 tokens, but tokens[1] is 3" in message


def test_sums_that_would_wrap_around_are_not_taken_for_right(tmp_path):
    arrays = as_arrays(make_trace(tokens=[3]))
    loads = np.zeros((1, 2, 4), dtype=np.uint64)
    loads[:] = [2**63, 2**63, 3, 3]
    assert "loads[n=0, l=0]" in refusal_of(tmp_path, {**arrays, "loads": loads})


@pytest.mark.parametrize(
    ("name", "index", "value", "wanted"),
    [
        ("tokens", 1, -3, "tokens[1] is -3"),
        ("time_s", 1, np.nan, "time_s[1] is nan"),
        ("time_s", 2, np.inf, "time_s[2] is inf"),
        ("time_s", 0, -0.5, "time_s[0] is -0.5"),
        ("time_s", 1, 7.0, "time_s[2] is 1.0, before time_s[1] = 7.0"),
        ("decode_tokens", 0, -1, "decode_tokens[0] is -1"),
        ("decode_tokens", 2, 99, "decode_tokens[2] is 99, more than tokens[2]"),
        ("predicted", (1, 0, 3), np.nan, "predicted[1, 0, 3] is nan"),
        ("predicted", (0, 1, 2), -0.25, "predicted[0, 1, 2] is -0.25"),
        ("predicted", (0, 1, 2), np.inf, "predicted[0, 1, 2] is inf"),
        ("topk_ids", (1, 0, 1), 4, "topk_ids[1, 0, 1] is 4; logical experts are 0 to 3"),
        ("topk_ids", (1, 0, 1), -1, "topk_ids[1, 0, 1] is -1"),
        ("topk_offsets", 0, 1, "topk_offsets run from 1"),
        ("topk_offsets", 3, 100, "topk_offsets run from 0 to 100"),
        ("topk_offsets", 1, -2, "topk_offsets give entry n=0 -2 tokens; they must ascend"),
        ("topk_offsets", 1, 0, "topk_offsets give entry n=0 0 tokens; but tokens[0]"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, name, index, value, wanted):
    arrays = as_arrays(make_trace(full=True))
    array = arrays[name].copy()
    array[index] = value
    assert wanted in refusal_of(tmp_path, {**arrays, name: array})


def test_a_token_that_chooses_an_expert_twice_is_named(tmp_path):
    arrays = as_arrays(make_trace(full=True))
    ids = arrays["topk_ids"].copy()
    ids[2, 1] = [3, 3]
    assert "topk_ids[2, 1] = [3, 3] names an expert twice" in refusal_of(
        tmp_path, {**arrays, "topk_ids": ids}
    )


def test_choices_that_do_not_add_up_to_the_loads_are_named(tmp_path):
    arrays = as_arrays(make_trace(full=True))
    ids = arrays["topk_ids"].copy()
    last = ids[-1, 1]
    free = next(expert for expert in range(4) if expert not in last)
    ids[-1, 1, 0] = free
    assert "entry n=2, l=1 do not add up" in refusal_of(tmp_path, {**arrays, "topk_ids": ids})


def test_steps_need_times_and_requests_have_none(tmp_path):
    arrays = with_meta(as_arrays(make_trace()), unit="requests")
    assert "time_s is for steps" in refusal_of(tmp_path, arrays)


def test_predictions_need_their_predictor(tmp_path):
    arrays = with_meta(as_arrays(make_trace(full=True)), predictor=None)
    assert "predicted needs meta.predictor" in refusal_of(tmp_path, arrays)


@pytest.mark.parametrize("name", ["loads", "meta", "group", "version"])
def test_pickles_are_never_loaded(tmp_path, name):
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    arrays = {**as_arrays(make_trace(full=True)), name: np.array([Attack()], dtype=object)}
    assert f"{name} holds Python objects" in refusal_of(tmp_path, arrays)
    assert not marker.exists()


def test_what_is_no_file_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "missing.npz")
    assert "is a directory" in refusal(tmp_path)
    assert "cannot be opened" in refusal(tmp_path / ("x" * 300))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in refusal(pipe)


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive", b"\x93NUMPY\x01\x00"])
def test_what_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    assert "not a readable .npz archive" in refusal(path)


def test_a_cut_archive_is_refused_wherever_it_is_cut(tmp_path):
    whole = save(tmp_path / "whole.npz", as_arrays(make_trace(full=True))).read_bytes()
    path = tmp_path / "cut.npz"
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        refusal(path)


def test_damaged_bytes_give_one_line_or_a_valid_trace(tmp_path):
    whole = save(tmp_path / "whole.npz", as_arrays(make_trace(full=True))).read_bytes()
    path = tmp_path / "damaged.npz"
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(whole), size=300):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        message = ""
        try:
            read_trace(path)
        except TraceError as error:
            message = str(error)
        assert "\n" not in message


def npy(header, payload=b""):
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + payload


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("(1000000, 1000, 1000)", "16 GiB"),
        ("(3, 2, 5)", "the file is damaged"),
        ("(-3, 2, 4)", "the file is damaged"),
        ("(" + "9" * 40 + ",)", "16 GiB"),
        ("((3, 2), 4)", "not a readable array"),
        ("(3, 2, 4", "not a readable array"),
    ],
)
def test_declared_sizes_are_checked_before_anything_is_allocated(tmp_path, shape, wanted):
    header = f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}, }}"
    path = save(tmp_path / "a.npz", as_arrays(make_trace()))
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(bomb, "w") as target:
        for member in source.namelist():
            content = source.read(member)
            target.writestr(member, npy(header, b"\0" * 96) if member == "loads.npy" else content)
    message = refusal(bomb)
    assert "loads" in message
    assert wanted in message


def test_an_array_that_is_there_twice_is_refused(tmp_path):
    path = save(tmp_path / "a.npz", as_arrays(make_trace()))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("tokens.npy", archive.read("tokens.npy"))
    assert "tokens is there more than once" in refusal(path)


def test_the_meta_document_is_plain_json(tmp_path):
    write_trace(make_trace(full=True), tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["version"].dtype == np.int32
        assert arrays["version"].shape == ()
        assert arrays["meta"].shape == ()
        assert json.loads(str(arrays["meta"])) == {
            "model": "tests/tiny",
            "num_layers": 2,
            "num_experts": 4,
            "top_k": 2,
            "layer_ids": [1, 3],
            "unit": "steps",
            "phase": "prefill",
            "source": "a test",
            "licence": "CC0",
            "predictor": {"kind": "gate", "distance": 1},
        }
