"""Every family, in every way in which its checkpoints are written."""

import json

import pytest
import torch
from store_checkpoints import (
    assert_equal_to_model,
    assert_serves_like,
    edit_config,
    open_store,
    save,
)

from families import FAMILIES, make_tiny
from moeless.engines.transformers import loader
from moeless.engines.transformers.loader import attach_runtime, describe_model, load_engine_model
from moeless.errors import EngineError, ModelError
from moeless.functions.store import ExpertStore

CASES = [(name, original) for name in sorted(FAMILIES) for original in (True, False)]


@pytest.mark.parametrize(("family", "original"), CASES)
def test_each_expert_equals_the_models_own_weights_bit_for_bit(family, original, tmp_path):
    model = FAMILIES[family]()
    store = open_store(save(model, tmp_path, original=original))
    assert_equal_to_model(store, model, family)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_experts_are_found_across_small_shards(family, tmp_path):
    model = FAMILIES[family]()
    store = open_store(save(model, tmp_path, shard="40KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_to_model(store, model, family)


@pytest.mark.parametrize(("family", "original"), CASES)
def test_a_model_without_weights_answers_like_the_whole_one(family, original, tmp_path, capfd):
    model = FAMILIES[family]()
    save(model, tmp_path, original=original)
    capfd.readouterr()
    loaded = load_engine_model(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert loaded.family.name == family
    assert loaded.spec.layer_ids == tuple(
        int(name.split(".")[2]) for name, _ in model.named_modules() if name.endswith(".experts")
    )
    assert loaded.spec.model_id == tmp_path.name
    runtime = assert_serves_like(loaded, model)
    for layer, hidden, index, weights in runtime.calls:
        assert 0 <= layer < loaded.spec.num_layers
        assert hidden.shape[1:] == (loaded.spec.expert.hidden,)
        assert index.dtype == torch.int64
        assert index.shape == weights.shape == (len(hidden), loaded.spec.top_k)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_engine_allocates_no_expert(family, tmp_path, monkeypatch):
    monkeypatch.setattr(
        loader, "lay_out_dense", lambda _: False
    )  # what is laid out is no parameter
    model = FAMILIES[family]()
    loaded = load_engine_model(save(model, tmp_path, shard="40KB"))
    experts = loaded.spec.num_functions * loaded.spec.expert.num_parameters
    whole = sum(tensor.numel() for tensor in model.parameters())
    kept = sum(tensor.numel() for tensor in loaded.model.parameters())
    assert kept == whole - experts
    assert all(not tensor.is_meta for tensor in loaded.model.parameters())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_rule_points_at_the_router_of_each_layer(family, tmp_path):
    loaded = load_engine_model(save(FAMILIES[family](), tmp_path))
    rule, layers = loaded.router_rule, loaded.model.get_submodule("model.layers")
    for block, layer_id in zip(loaded.moe_blocks, loaded.spec.layer_ids, strict=True):
        assert layers[layer_id].get_submodule(rule.path) is block.router
        assert block.router.weight.shape == (loaded.spec.num_experts, loaded.spec.expert.hidden)
        assert (getattr(block.router, "bias", None) is not None) == rule.has_bias
        if rule.correction_bias:
            assert hasattr(block.router, rule.correction_bias)
    assert rule.top_k == loaded.spec.top_k


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bfloat16_checkpoints_keep_their_bits(family, tmp_path):
    model = FAMILIES[family]().to(torch.bfloat16)
    store = open_store(save(model, tmp_path))
    assert store.spec.expert.dtype == "bfloat16"
    assert_equal_to_model(store, model, family)


def test_a_dtype_that_is_asked_for_converts_engine_and_experts(tmp_path):
    model = FAMILIES["mixtral"]()
    loaded = load_engine_model(save(model, tmp_path), dtype="bfloat16")
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}
    store = ExpertStore(tmp_path, loaded.layout, loaded.spec)
    assert_equal_to_model(store, model.to(torch.bfloat16), "mixtral")


def test_before_a_runtime_is_attached_a_forward_pass_says_so(tmp_path):
    loaded = load_engine_model(save(FAMILIES["qwen3_moe"](), tmp_path))
    with pytest.raises(EngineError, match="MoE layer 0; call attach_runtime"):
        loaded.model(torch.tensor([[3, 4]]))


def test_a_runtime_that_returns_another_shape_is_noticed(tmp_path):
    loaded = load_engine_model(save(FAMILIES["olmoe"](), tmp_path))
    attach_runtime(loaded, lambda layer, hidden, index, weights: hidden[:1])
    with pytest.raises(EngineError, match=r"returned \[1, 32\] for MoE layer 0"):
        loaded.model(torch.tensor([[3, 4]]))


def test_loading_leaves_the_library_as_it_was(tmp_path):
    model = FAMILIES["mixtral"]()
    load_engine_model(save(model, tmp_path))
    again = type(model).from_pretrained(tmp_path)
    assert type(again.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    prompt = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(again(prompt).logits, model(prompt).logits)


def test_llama_4_takes_more_than_one_expert_in_ascending_order(tmp_path):
    model = make_tiny("llama4", num_experts_per_tok=3)
    loaded = load_engine_model(save(model, tmp_path))
    runtime = assert_serves_like(loaded, model)
    for _, _, index, _ in runtime.calls:
        assert torch.equal(index, index.sort(dim=-1).values)


def test_the_text_model_of_multimodal_llama_4_is_served(tmp_path):
    import transformers

    text = make_tiny("llama4")
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 64, "image_size": 28, "patch_size": 14}
    vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    config = transformers.Llama4Config(
        text_config=text.config.to_dict(), vision_config=vision, dtype="float32"
    )
    whole = transformers.Llama4ForConditionalGeneration(config).eval()
    whole.language_model.load_state_dict(text.state_dict())
    loaded = load_engine_model(save(whole, tmp_path))
    assert type(loaded.model).__name__ == "Llama4ForCausalLM"
    assert loaded.layout.down.keys[0].startswith("language_model.model.layers.")
    assert_serves_like(loaded, text)


def test_a_tied_head_that_only_the_index_lists_is_the_embedding(tmp_path):
    model = make_tiny("olmoe", tie_word_embeddings=True)
    save(model, tmp_path, shard="40KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert "lm_head.weight" not in index["weight_map"]
    index["weight_map"]["lm_head.weight"] = min(index["weight_map"].values())
    path.write_text(json.dumps(index))
    describe_model(tmp_path)
    assert_serves_like(load_engine_model(tmp_path), model)


@pytest.mark.parametrize("stale", ["missing", "garbage", "another"])
def test_a_whole_file_beside_an_index_is_what_counts(tmp_path, stale):
    model = make_tiny("mixtral")
    save(make_tiny("mixtral", num_hidden_layers=1), tmp_path, shard="40KB")
    path = tmp_path / "model.safetensors.index.json"
    if stale == "missing":
        for shard in tmp_path.glob("model-*.safetensors"):
            shard.unlink()
    elif stale == "garbage":
        path.write_text("{")
    index = path.read_bytes()
    save(model, tmp_path)
    path.write_bytes(index)
    describe_model(tmp_path)
    assert_serves_like(load_engine_model(tmp_path), model)


def test_describing_reads_headers_only(tmp_path, monkeypatch):
    save(make_tiny("deepseek_v3"), tmp_path)
    monkeypatch.delattr("os.preadv")
    assert describe_model(tmp_path).spec.num_experts == 16


def test_weights_of_layers_past_the_last_one_are_left_alone(tmp_path):
    model = make_tiny("deepseek_v3")
    save(model, tmp_path)
    edit_config(tmp_path, num_hidden_layers=2)
    loaded = load_engine_model(tmp_path)
    assert loaded.spec.layer_ids == (1,)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
        ("llama4", {"moe_layers": []}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
    ],
)
def test_a_known_family_without_moe_layers_is_dense(family, field, tmp_path):
    save(FAMILIES[family](), tmp_path)
    edit_config(tmp_path, **field)
    with pytest.raises(ModelError, match="is a dense model: no experts to serve"):
        load_engine_model(tmp_path)
