"""Gate inputs on disk: what is written is read again, and damage is named."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from moeless.core.router import RouterRule  # noqa: E402
from moeless.errors import TraceError  # noqa: E402
from moeless.learned.gate_predictor import Gate  # noqa: E402
from moeless.learned.shards import (  # noqa: E402
    GateShards,
    Shard,
    ShardManifest,
    ShardWriter,
    fingerprint_gates,
    read_manifest,
)

LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 4, 2, 8
RULE = RouterRule(kind="topk_softmax", path="mlp.router", top_k=TOP_K, has_bias=True)


@pytest.fixture
def gates():
    generator = torch.Generator().manual_seed(0)
    return [
        Gate(
            torch.randn(EXPERTS, HIDDEN, generator=generator),
            torch.randn(EXPERTS, generator=generator),
            RULE,
        )
        for _ in range(LAYERS)
    ]


@pytest.fixture
def manifest(gates):
    return ShardManifest(
        model="tiny",
        family="gpt_oss",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        layer_ids=(0, 2, 3),
        dtype="bfloat16",
        gates_sha256=fingerprint_gates(gates),
        router_rule=RULE,
        prompts={"source": "arena", "limit": None, "seed": 1},
        config={"layer_inputs": False, "max_tokens": 4},
    )


def conversation(number, tokens=5, *, layer_input=False):
    """A conversation whose numbers tell its rows apart."""
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(tokens, LAYERS, HIDDEN, generator=generator).bfloat16()
    return Shard(
        gate_input=states,
        topk_ids=torch.randint(0, EXPERTS, (tokens, LAYERS, TOP_K), generator=generator).short(),
        conversation=torch.full((tokens,), number, dtype=torch.int32),
        position=torch.arange(tokens, dtype=torch.int32),
        decode=(torch.arange(tokens) >= 3).to(torch.uint8),
        token_ids=torch.arange(tokens, dtype=torch.int32) + 100 * number,
        layer_input=-states if layer_input else None,
    )


@pytest.fixture
def rows(manifest, gates, tmp_path):
    """Bytes of so many rows."""
    writer = ShardWriter(tmp_path / "probe", manifest, gates)
    return lambda count: writer.bytes_per_token * count


@pytest.fixture
def recording(manifest, gates, tmp_path, rows):
    """A directory of three conversations in two shards."""
    directory = tmp_path / "recording"
    with ShardWriter(directory, manifest, gates, max_bytes_per_shard=rows(11)) as writer:
        for number in (2, 0, 7):
            writer.add(conversation(number))
    return directory


def same(shard, others):
    """Whether a shard is the concatenation of others."""
    for name in Shard._fields:
        parts = [getattr(other, name) for other in others]
        found = getattr(shard, name)
        if parts[0] is None:
            assert found is None
        else:
            assert torch.equal(found, torch.cat(parts)), name
    return True


def test_what_was_written_is_read_again(recording, gates):
    shards = GateShards(recording)
    assert len(shards) == 2
    first, second = shards
    assert same(first, [conversation(2), conversation(0)])
    assert same(second, [conversation(7)])
    assert first.gate_input.dtype == torch.bfloat16
    assert shards.conversations == (0, 2, 7)
    for read, gate in zip(shards.gates, gates, strict=True):
        assert torch.equal(read.weight, gate.weight)
        assert torch.equal(read.bias, gate.bias)
        assert read.rule == RULE
        assert read.correction is None
    assert [len(list(shards)) for _ in range(2)] == [2, 2], "it can be read more than once"


def test_the_manifest_says_what_is_there(recording, manifest):
    found = read_manifest(recording)
    assert found.tokens == 15
    assert [entry.tokens for entry in found.shards] == [10, 5]
    assert (found.shards[0].first_conversation, found.shards[0].last_conversation) == (0, 2)
    assert not found.complete
    assert replace(found, shards=()) == manifest
    content = json.loads((recording / "manifest.json").read_text())
    assert content["format"] == "moeless-gate-inputs"
    assert content["version"] == 1


def test_the_inputs_of_layers_are_kept_where_they_are_wanted(manifest, gates, tmp_path):
    wanted = replace(manifest, config={"layer_inputs": True})
    with ShardWriter(tmp_path / "both", wanted, gates) as writer:
        writer.add(conversation(1, layer_input=True))
        with pytest.raises(TraceError, match="layer inputs are missing"):
            writer.add(conversation(2))
    (shard,) = GateShards(tmp_path / "both")
    assert same(shard, [conversation(1, layer_input=True)])


def test_a_conversation_longer_than_a_shard_spans_several(manifest, gates, tmp_path, rows):
    directory = tmp_path / "long"
    with ShardWriter(directory, manifest, gates, max_bytes_per_shard=rows(4)) as writer:
        writer.add(conversation(3, tokens=10))
        writer.add(conversation(4, tokens=2))
    shards = GateShards(directory)
    assert [shard.tokens for shard in shards] == [4, 4, 4]
    assert torch.cat([shard.token_ids for shard in shards]).tolist() == [
        *range(300, 310),
        400,
        401,
    ]


def test_after_a_crash_a_long_conversation_is_there_whole_or_not_at_all(
    manifest, gates, tmp_path, rows
):
    directory = tmp_path / "crashed"
    writer = ShardWriter(directory, manifest, gates, max_bytes_per_shard=rows(4))
    writer.add(conversation(1, tokens=4))
    writer.add(conversation(3, tokens=10))  # its first rows are on disk, the last are not
    assert len(list(directory.glob("shard-*"))) == 3
    again = ShardWriter.resume(directory, max_bytes_per_shard=rows(4))
    assert again.recorded == {1}
    again.add(conversation(3, tokens=10))
    again.close(complete=True)
    assert [shard.tokens for shard in GateShards(directory)] == [4, 4, 4, 2]
    assert read_manifest(directory).complete


def test_a_conversation_may_come_in_pieces(manifest, gates, tmp_path, rows):
    whole = conversation(3, tokens=10)
    pieces = [
        Shard(*(part if part is None else part[a:b] for part in whole))
        for a, b in ((0, 3), (3, 9), (9, 10))
    ]
    with ShardWriter(tmp_path / "pieces", manifest, gates, max_bytes_per_shard=rows(8)) as writer:
        writer.add(conversation(1))
        writer.add_pieces(iter(pieces))
    shards = list(GateShards(tmp_path / "pieces"))
    assert [shard.tokens for shard in shards] == [8, 7]
    joined = [
        None if first is None else torch.cat([first, second])
        for first, second in zip(*shards, strict=True)
    ]
    assert same(Shard(*joined), [conversation(1), whole])


def test_a_conversation_whose_later_piece_is_refused_leaves_nothing(
    manifest, gates, tmp_path, rows
):
    directory = tmp_path / "refused"
    with ShardWriter(directory, manifest, gates, max_bytes_per_shard=rows(6)) as writer:
        writer.add(conversation(1))
        with pytest.raises(TraceError, match="position is"):
            writer.add(
                conversation(2, tokens=20), conversation(2)._replace(position=torch.zeros(1))
            )
        assert writer.recorded == {1}
        writer.add(conversation(2))
    assert [shard.conversation.unique().tolist() for shard in GateShards(directory)] == [[1], [2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "model was 'tiny' and is now 'other'"),
        ({"prompts": {"source": "sharegpt", "seed": 1}}, "prompts.source was 'arena' and is now"),
        ({"config": {"layer_inputs": False, "max_tokens": 9}}, "config.max_tokens was 4 and"),
    ],
)
def test_another_recording_is_not_continued(recording, manifest, change, message):
    with pytest.raises(TraceError, match=message):
        ShardWriter.resume(recording, manifest=replace(manifest, **change))


def test_how_much_is_recorded_may_change_when_it_is_continued(recording, manifest):
    more = replace(
        manifest,
        prompts={"source": "arena", "limit": 99, "seed": 1},
        config={**manifest.config, "limits": {"max_recorded_tokens": 1000}},
    )
    ShardWriter.resume(recording, manifest=more).close(complete=True)
    assert replace(read_manifest(recording), shards=(), complete=False) == more


def test_resuming_continues_after_the_last_whole_shard(recording):
    (recording / "shard-00002.safetensors.partial").write_bytes(b"half")
    writer = ShardWriter.resume(recording)
    assert writer.recorded == {0, 2, 7}
    assert writer.tokens == 15
    with pytest.raises(TraceError, match="conversation 7 is recorded already"):
        writer.add(conversation(7))
    writer.add(conversation(5))
    writer.close()
    assert GateShards(recording).conversations == (0, 2, 5, 7)
    assert sorted(path.name for path in recording.iterdir()) == [
        "gates.safetensors",
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "shard-00002.safetensors",
    ]


def test_a_directory_never_grows_beyond_its_bound(manifest, gates, tmp_path, rows):
    directory, bound = tmp_path / "bounded", 40_000
    writer = ShardWriter(
        directory, manifest, gates, max_bytes_per_shard=rows(20), max_total_bytes=bound
    )
    number = 0
    while writer.room_tokens() >= 5:
        writer.add(conversation(number))
        number += 1
    with pytest.raises(TraceError, match=f"5 tokens do not fit into {bound} bytes"):
        writer.add(conversation(number))
    writer.close()
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert bound / 2 < size <= bound
    assert GateShards(directory).conversations == tuple(range(number))


def test_a_recording_is_not_overwritten(recording, manifest, gates):
    with pytest.raises(TraceError, match="holds a recording already"):
        ShardWriter(recording, manifest, gates)


def test_gates_of_another_model_are_refused(manifest, gates, tmp_path):
    with pytest.raises(TraceError, match="not that of these gates"):
        ShardWriter(tmp_path / "other", manifest, gates[::-1])


def test_a_split_is_by_conversation_and_repeats_with_its_seed(manifest, gates, tmp_path):
    directory = tmp_path / "many"
    with ShardWriter(directory, manifest, gates) as writer:
        for number in range(10):
            writer.add(conversation(number))
    shards = GateShards(directory)
    fit, held = shards.split(0.3, seed=5)
    assert len(held) == 3
    assert fit | held == set(range(10))
    assert not fit & held
    assert shards.split(0.3, seed=5) == (fit, held)
    assert shards.split(0.3, seed=6) != (fit, held)
    assert all(len(side) >= 1 for side in shards.split(0.001))
    with pytest.raises(ValueError, match="held_out is 1"):
        shards.split(1.0)


def test_one_conversation_cannot_be_split(manifest, gates, tmp_path):
    with ShardWriter(tmp_path / "one", manifest, gates) as writer:
        writer.add(conversation(0))
    with pytest.raises(TraceError, match="at least 2"):
        GateShards(tmp_path / "one").split()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_input": torch.zeros(5, LAYERS, HIDDEN)}, "gate_input is torch.float32"),
        (
            {"gate_input": torch.zeros(5, LAYERS, 7).bfloat16()},
            r"gate_input is torch.bfloat16 \[5, 3, 7\], expected torch.bfloat16 \[5, 3, 8\]",
        ),
        ({"position": torch.zeros(4).int()}, r"position is torch.int32 \[4\]"),
        (
            {"topk_ids": torch.full((5, LAYERS, TOP_K), EXPERTS).short()},
            "topk_ids names experts 4 to 4, but there are 4",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(manifest, gates, tmp_path, change, message):
    writer = ShardWriter(tmp_path / "refused", manifest, gates)
    with pytest.raises(TraceError, match=f"conversation 1: .*{message}"):
        writer.add(conversation(1)._replace(**change))


def test_numbers_that_are_not_finite_are_named(manifest, gates, tmp_path):
    broken = conversation(1, tokens=600)
    broken.gate_input[399, 2, 5] = float("inf")
    writer = ShardWriter(tmp_path / "infinite", manifest, gates)
    with pytest.raises(TraceError, match="gate_input is not finite in layer 2, token 399"):
        writer.add(broken)


# -- what is wrong in a directory -------------------------------------------------------------


def rewrite_shard(directory, **change):
    """Change tensors of the first shard, and the digest in the manifest with them."""
    from moeless.learned.shards.files import sha256_of

    path = directory / "shard-00000.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)
    edit(directory, lambda content: content["shards"][0].update(sha256=sha256_of(path)))


def edit(directory, change):
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(directory):
    """The one line that says what is wrong."""
    with pytest.raises(TraceError) as caught:
        for _ in GateShards(directory):
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_manifest_is_named(tmp_path):
    assert "has no manifest.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "format is not 'moeless-gate-inputs'"),
        (lambda m: m.update(version=2), "has version 2; this moeless reads version 1"),
        (lambda m: m.pop("hidden"), "hidden is missing"),
        (lambda m: m.update(hidden="8"), "hidden is '8', not of type"),
        (lambda m: m.update(hidden=True), "hidden is True, not of type"),
        (lambda m: m.update(colour="red"), "colour is not known"),
        (lambda m: m.update(num_layers=0), "num_layers is 0"),
        (lambda m: m.update(num_layers=2), "layer_ids names 3 layers, but num_layers is 2"),
        (lambda m: m.update(layer_ids="abc"), "layer_ids is not a list"),
        (lambda m: m.update(top_k=9), "top_k is 9, but num_experts is 4"),
        (lambda m: m.update(dtype="int8"), "dtype is 'int8'"),
        (lambda m: m.update(router_rule=3), "router_rule is not an object"),
        (lambda m: m["router_rule"].pop("path"), "router_rule.path is missing"),
        (lambda m: m["router_rule"].update(top_k=1), "router_rule.top_k is 1"),
        (lambda m: m.update(shards=3), "shards is not a list"),
        (lambda m: m["shards"][1].pop("tokens"), r"shards[1].tokens is missing"),
        (lambda m: m["shards"][0].update(file="../x"), "is no name of a shard"),
        (lambda m: m["shards"][0].update(tokens=9), "holds 10 tokens, but the manifest says 9"),
        (lambda m: m.update(gates_sha256="0"), "holds other gates"),
        (lambda m: m.update(hidden=16), "weight.0 has shape [4, 8], expected [4, 16]"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named_with_the_field(recording, change, message):
    edit(recording, change)
    assert message in refusal(recording)


def test_a_manifest_that_is_no_json_is_named(recording):
    (recording / "manifest.json").write_text('{"format": ')
    assert "not readable JSON" in refusal(recording)


def test_a_missing_shard_is_named(recording):
    (recording / "shard-00001.safetensors").unlink()
    assert "shard-00001.safetensors is missing" in refusal(recording)


def test_a_truncated_shard_is_named(recording):
    path = recording / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert "shard-00001.safetensors is truncated or damaged" in refusal(recording)


def test_a_changed_shard_is_named(recording):
    path = recording / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "shard-00001.safetensors was changed" in refusal(recording)


def test_a_missing_tensor_is_named(recording):
    rewrite_shard(recording, decode=None)
    assert "has no tensor decode" in refusal(recording)


def test_shapes_that_do_not_match_the_manifest_are_named(recording):
    rewrite_shard(recording, gate_input=torch.zeros(10, LAYERS, 4).bfloat16())
    assert "gate_input is torch.bfloat16 [10, 3, 4]" in refusal(recording)


def test_infinite_gate_inputs_are_named_with_shard_layer_and_token(recording):
    states = torch.zeros(10, LAYERS, HIDDEN).bfloat16()
    states[6, 1, 0] = float("nan")
    rewrite_shard(recording, gate_input=states)
    line = refusal(recording)
    assert "shard-00000.safetensors: gate_input is not finite in layer 1, token 6" in line


def test_missing_gates_are_named(recording):
    (recording / "gates.safetensors").unlink()
    assert "has no gates.safetensors" in refusal(recording)


def test_damaged_gates_are_named(recording):
    (recording / "gates.safetensors").write_bytes(b"nothing")
    assert "gates.safetensors is damaged" in refusal(recording)


def test_gates_without_a_bias_that_the_rule_needs_are_named(recording, gates):
    tensors = load_file(recording / "gates.safetensors")
    del tensors["bias.1"]
    save_file(tensors, recording / "gates.safetensors")
    assert "has no bias.1" in refusal(recording)


def test_resuming_names_a_damaged_shard(recording):
    (recording / "shard-00000.safetensors").unlink()
    with pytest.raises(TraceError, match=r"shard-00000.safetensors is missing"):
        ShardWriter.resume(recording)
