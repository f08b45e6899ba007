"""What is wrong with a checkpoint is said in one line that names the file, tensor and remedy."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from store_checkpoints import edit_config, open_store, rewrite, save, write_header

from families import FAMILIES
from moeless.engines.transformers.loader import describe_model, load_engine_model
from moeless.engines.transformers.resolve import resolve_model
from moeless.errors import CheckpointError, ConfigError, FunctionError, ModelError
from moeless.functions.store import CheckpointIndex, ExpertStore

W2 = "model.layers.1.block_sparse_moe.experts.5.w2.weight"


def refused(action, *parts, error=CheckpointError):
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


@pytest.fixture
def mixtral(tmp_path):
    return save(FAMILIES["mixtral"](), tmp_path)


@pytest.fixture
def sharded(tmp_path):
    return save(FAMILIES["mixtral"](), tmp_path, shard="40KB")


def shard_of(directory, key):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][key]


def reads(store, layer=1, expert=5):
    return lambda: store.load(layer, expert)


def test_a_missing_key_is_named(mixtral):
    def drop(tensors):
        del tensors[W2]
        return tensors

    rewrite(mixtral, drop)
    refused(lambda: open_store(mixtral), f"key {W2} is missing from {mixtral}", "download")


def test_a_missing_shard_is_named(sharded):
    shard = shard_of(sharded, W2)
    shard.unlink()
    refused(lambda: open_store(sharded), f"shard {shard} is missing; download it", "tensor model.")


def test_a_key_that_the_index_misplaces_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    others = sorted(set(content["weight_map"].values()) - {content["weight_map"][W2]})
    content["weight_map"][W2] = others[0]
    index.write_text(json.dumps(content))
    refused(lambda: open_store(sharded), f"tensor {W2} is missing from shard", others[0])


def test_a_wrong_shape_is_named(mixtral):
    rewrite(mixtral, lambda tensors: {**tensors, W2: torch.zeros(32, 47)})
    refused(
        lambda: open_store(mixtral), f"tensor {W2} of shard", "F32 [32, 47]", "[32, 48]", "config"
    )


def test_a_wrong_dtype_is_named(mixtral):
    rewrite(mixtral, lambda tensors: {**tensors, W2: torch.zeros(32, 48, dtype=torch.int8)})
    refused(lambda: open_store(mixtral), f"tensor {W2} of shard", "is I8 [32, 48]")


def test_fused_tensors_with_too_few_experts_are_named(tmp_path):
    save(FAMILIES["granitemoeshared"](), tmp_path)
    key = "model.layers.2.block_sparse_moe.output_linear.weight"
    rewrite(tmp_path, lambda tensors: {**tensors, key: tensors[key][:15]})
    refused(lambda: open_store(tmp_path), key, "F32 [15, 32, 16]", "[16, 32, 16]")


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_shard_is_noticed_at_the_start(mixtral, keep):
    path = mixtral / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    message = refused(lambda: open_store(mixtral), f"shard {path} is truncated or corrupt")
    assert re.search(r"header says \d+ bytes, the file has \d+; download it again", message)


@pytest.mark.parametrize("garbage", [b"{]", b"[1, 2]", b'{"a": 1}', b"\xff\xfe", b'{"a": {}}'])
def test_a_header_that_is_not_one_is_noticed(mixtral, garbage):
    path = mixtral / "model.safetensors"
    path.write_bytes(len(garbage).to_bytes(8, "little") + garbage)
    refused(lambda: open_store(mixtral), f"shard {path} is corrupt", "header", "download it again")


@pytest.mark.parametrize("offsets", [[-4, 0], [4, 0], [0, 3], [0, 2**70], ["0", 4]])
def test_offsets_that_cannot_be_are_noticed(tmp_path, offsets):
    path = tmp_path / "model.safetensors"
    write_header(path, {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}, 4)
    refused(lambda: CheckpointIndex(tmp_path), f"shard {path} is", "corrupt", "download it again")


def test_a_shard_that_is_cut_after_the_start_fails_the_load_not_the_process(mixtral):
    store = open_store(mixtral)
    store.load(0, 0)
    path = mixtral / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    refused(reads(store), "tensor model.layers.1.", f"shard {path} is truncated", "download")


def test_a_shard_that_vanishes_after_the_start_fails_the_load(mixtral):
    store = open_store(mixtral)
    store.load(0, 0)
    path = mixtral / "model.safetensors"
    path.unlink()
    refused(reads(store), "tensor model.layers.1.", f"shard {path} is missing; download it")


def test_a_short_read_is_an_error(mixtral, monkeypatch):
    store = open_store(mixtral)
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    refused(reads(store), "tensor model.layers.1.", "ends at byte", "download the shard again")


def test_an_input_output_error_is_one_line(mixtral, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    store = open_store(mixtral)
    monkeypatch.setattr("os.preadv", fail)
    refused(reads(store), "tensor model.layers.1.", "cannot be read (Input/output error)")


def test_reads_that_come_in_pieces_are_joined(mixtral, monkeypatch):
    from moeless.functions.store import shard

    expected = open_store(mixtral).load(2, 3)
    monkeypatch.setattr(shard, "_MAX_READ_BYTES", 1000)
    again = open_store(mixtral).load(2, 3)
    assert all(map(torch.equal, again.tensors(), expected.tensors()))


def test_a_shard_that_is_replaced_by_another_checkpoint_is_noticed(mixtral):
    store = open_store(mixtral)
    expected = store.load(1, 5)
    path = mixtral / "model.safetensors"
    content = path.read_bytes()
    rewrite(mixtral, lambda tensors: {**tensors, W2: torch.zeros(3)})
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1.* was replaced"):
            store._index.read_into(W2, 0, memoryview(bytearray(4)))
    path.write_bytes(content)
    assert all(map(torch.equal, store.load(1, 5).tensors(), expected.tensors()))


def test_a_checkpoint_that_is_copied_again_still_loads(mixtral):
    store = open_store(mixtral)
    expected = store.load(1, 5)
    path = mixtral / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert all(map(torch.equal, store.load(1, 5).tensors(), expected.tensors()))


def test_loaded_weights_outlive_the_file(mixtral):
    store = open_store(mixtral)
    loaded = store.load(1, 5)
    before = [tensor.clone() for tensor in loaded.tensors()]
    path = mixtral / "model.safetensors"
    path.write_bytes(b"")
    store.close()
    assert all(map(torch.equal, loaded.tensors(), before))


def test_a_closed_store_opens_files_again(mixtral):
    with open_store(mixtral) as store:
        expected = store.load(0, 1)
    assert torch.equal(store.load(0, 1).gate, expected.gate)


@pytest.mark.parametrize(("layer", "expert"), [(3, 0), (-1, 0), (0, 8), (0, -1)])
def test_an_expert_that_does_not_exist_is_refused(mixtral, layer, expert):
    store = open_store(mixtral)
    refused(
        reads(store, layer, expert), f"no expert {expert} in layer {layer}", error=FunctionError
    )


def test_pickled_weights_are_refused(mixtral):
    (mixtral / "model.safetensors").rename(mixtral / "pytorch_model.bin")
    refused(lambda: load_engine_model(mixtral), "only safetensors are read", "save_pretrained")


def test_a_directory_without_weights_is_refused(mixtral):
    (mixtral / "model.safetensors").unlink()
    refused(lambda: load_engine_model(mixtral), f"{mixtral} has no weights", "download")


def test_shards_without_their_index_are_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    refused(lambda: load_engine_model(sharded), "download the index")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("consolidated.safetensors", "holds consolidated.safetensors, weights under other names"),
        ("model-q4.gguf", "holds GGUF files; only safetensors are read"),
    ],
)
def test_weights_of_another_format_are_told_by_their_name(mixtral, name, said):
    (mixtral / "model.safetensors").rename(mixtral / name)
    refused(lambda: load_engine_model(mixtral), said)
    if name.endswith("gguf"):
        (mixtral / "config.json").unlink()
        refused(lambda: load_engine_model(mixtral), said)
        refused(lambda: resolve_model(str(mixtral / name)), "is a GGUF file; only safetensors")


LOST = [
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.1.block_sparse_moe.gate.weight",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4977328368\n"


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors.index.json"])
def test_a_pointer_of_git_is_not_taken_for_a_damaged_file(sharded, name):
    path = sharded / name if name else shard_of(sharded, LOST[0])
    path.write_text(POINTER)
    for action in (load_engine_model, describe_model):
        refused(lambda: action(sharded), f"{path} is a Git LFS pointer", "git lfs pull")  # noqa: B023


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("change", ["lost", "misshapen", "listed"])
def test_what_is_not_loaded_is_not_described_either(tmp_path, lost, change):
    def drop(tensors):
        tensors[lost] = torch.zeros(3, 5)
        if change == "lost":
            del tensors[lost]
        return tensors

    save(FAMILIES["mixtral"](), tmp_path)
    if change == "listed":  # the index has it, the shard has not
        keys = load_file(tmp_path / "model.safetensors")
        names = dict.fromkeys(keys, "model-1.safetensors")
        index = {"weight_map": names}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        del keys[lost]
        save_file(keys, tmp_path / "model-1.safetensors")
        (tmp_path / "model.safetensors").unlink()
    else:
        rewrite(tmp_path, drop)
    said = refused(lambda: load_engine_model(tmp_path), str(tmp_path), lost[-12:])
    assert refused(lambda: describe_model(tmp_path)) == said
    if change == "misshapen":
        assert "[3, 5]" in said
        assert said.endswith("config.json and the weights do not belong together")


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss", "granitemoeshared"])
@pytest.mark.parametrize("said", [12, 20])
def test_another_number_of_experts_in_the_configuration_is_one_line(tmp_path, family, said):
    save(FAMILIES[family](), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    edit_config(tmp_path, **{name: said})
    for action in (load_engine_model, describe_model):
        refused(
            lambda: action(tmp_path),  # noqa: B023
            f"config.json of {tmp_path} says {said} experts per layer, but the weights have "
            f"{fields[name]}",
        )


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": {"a": 3}}', '{"weight_map": 3}'])
def test_an_index_that_is_not_one_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(lambda: CheckpointIndex(sharded), "model.safetensors.index.json")


def test_an_index_cannot_lead_out_of_the_directory(sharded):
    content = {"weight_map": {"a": "../other/model.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(lambda: CheckpointIndex(sharded), "not a plain file name")


def test_no_directory_is_refused(tmp_path):
    refused(lambda: CheckpointIndex(tmp_path / "no"), "is not a directory")
    refused(lambda: load_engine_model(tmp_path / "no"), "has no config.json")


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_config_that_is_not_one_is_refused(mixtral, content):
    (mixtral / "config.json").write_text(content)
    refused(lambda: load_engine_model(mixtral), "config.json", "download it again")


def test_a_config_that_transformers_rejects_is_refused(mixtral):
    edit_config(mixtral, num_hidden_layers="three")
    refused(lambda: load_engine_model(mixtral), "config.json cannot be used")


def test_a_dense_model_is_refused(mixtral):
    edit_config(mixtral, model_type="llama", num_local_experts=None)
    refused(
        lambda: load_engine_model(mixtral),
        "llama is a dense model: no experts to serve",
        error=ModelError,
    )


def test_an_unknown_family_is_refused_with_those_known(mixtral):
    edit_config(mixtral, model_type="jetmoe")
    refused(
        lambda: load_engine_model(mixtral),
        "jetmoe is a Mixture of Experts of an unknown family",
        "deepseek_v3, gpt_oss, granitemoeshared, llama4, llama4_text, mixtral, olmoe, phimoe",
        error=ModelError,
    )


def test_an_unknown_activation_is_refused(mixtral):
    edit_config(mixtral, hidden_act="mish")
    refused(lambda: load_engine_model(mixtral), "hidden_act 'mish'", error=ModelError)


def test_an_unknown_dtype_is_refused(mixtral):
    refused(
        lambda: load_engine_model(mixtral, dtype="int4"), "dtype 'int4'", "auto", error=ConfigError
    )


def test_experts_under_unknown_names_are_refused(mixtral):
    rewrite(
        mixtral, lambda tensors: {k.replace("experts", "xperts"): v for k, v in tensors.items()}
    )
    refused(lambda: load_engine_model(mixtral), "no expert weights of the mixtral family")


def test_a_weight_that_the_engine_needs_is_missed(mixtral):
    lost = "model.layers.2.self_attn.q_proj.weight"

    def drop(tensors):
        del tensors[lost]
        return tensors

    rewrite(mixtral, drop)
    refused(lambda: load_engine_model(mixtral), f"key {lost} is missing from {mixtral}")


def test_a_weight_of_another_shape_is_refused_and_leaves_the_library_whole(mixtral):
    rewrite(mixtral, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(3, 4)})
    refused(lambda: load_engine_model(mixtral), f"{mixtral} is [3, 4], expected [320, 32]")


def test_a_model_that_cannot_be_built_leaves_the_library_whole(mixtral):
    from transformers.models.mixtral import modeling_mixtral

    original = modeling_mixtral.MixtralExperts
    edit_config(mixtral, num_attention_heads=0, head_dim=None)
    refused(lambda: load_engine_model(mixtral), str(mixtral))
    assert modeling_mixtral.MixtralExperts is original


def test_a_read_that_fails_while_the_engine_loads_names_the_tensor(mixtral, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    refused(lambda: load_engine_model(mixtral), "tensor ", "Input/output error")


def test_a_store_reads_only_the_bytes_of_its_expert(tmp_path, monkeypatch):
    import os

    save(FAMILIES["gpt_oss"](), tmp_path)
    store = open_store(tmp_path)
    real, total = os.preadv, []

    def count(descriptor, buffers, offset):
        total.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("os.preadv", count)
    store.load(2, 7)
    assert sum(total) == store.bytes_of_function
    assert isinstance(store, ExpertStore)


def test_threads_that_load_while_the_store_is_closed_read_the_right_bytes(mixtral):
    from concurrent.futures import ThreadPoolExecutor

    store = open_store(mixtral)
    expected = {e: store.load(1, e) for e in range(8)}

    def work(turn):
        if turn % 5 == 0:
            store.close()
        return turn % 8, store.load(1, turn % 8)

    with ThreadPoolExecutor(4) as pool:
        for expert, loaded in pool.map(work, range(200)):
            assert all(map(torch.equal, loaded.tensors(), expected[expert].tensors()))
