"""From a model's name to its directory."""

import pytest
from store_checkpoints import save

from families import FAMILIES, make_tokenizer
from moeless.engines.transformers.loader import load_engine_model
from moeless.engines.transformers.resolve import resolve_model
from moeless.errors import CheckpointError


def test_a_directory_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere", "a/b/c", "~/nowhere"])
def test_what_is_neither_directory_nor_hub_id_is_refused(name):
    with pytest.raises(CheckpointError, match="is not a directory; give a model directory or"):
        resolve_model(name)


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        resolve_model(str(path))


def test_a_hub_id_that_is_not_cached_needs_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="acme/moe is neither a directory nor in the hub"):
        resolve_model("acme/moe", local_files_only=True)


def test_a_cached_hub_id_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--moe"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    save(FAMILIES["olmoe"](), snapshot)
    assert resolve_model("acme/moe", local_files_only=True) == snapshot


def test_only_plain_weights_and_texts_are_downloaded(tmp_path, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    def pretend(name, *, allow_patterns, ignore_patterns, local_files_only):
        wanted = filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert sorted(wanted) == ["a.safetensors", "chat_template.jinja", "config.json"]
        return str(tmp_path)

    files = ["config.json", "a.safetensors", "chat_template.jinja", "pytorch_model.bin"]
    files += ["modeling.py", "original/a.safetensors", "consolidated.safetensors"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", pretend)
    assert resolve_model("acme/moe") == tmp_path


def test_the_tokenizer_comes_along_if_there_is_one(tmp_path):
    save(FAMILIES["olmoe"](), tmp_path)
    assert load_engine_model(tmp_path).tokenizer is None
    make_tokenizer().save_pretrained(tmp_path)
    assert load_engine_model(tmp_path).tokenizer.decode([1]) == "<bos>"


def test_a_broken_tokenizer_is_refused(tmp_path):
    save(FAMILIES["olmoe"](), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be loaded"):
        load_engine_model(tmp_path)


def test_the_generation_config_is_kept(tmp_path):
    model = FAMILIES["olmoe"]()
    model.generation_config.update(temperature=0.25, do_sample=True, eos_token_id=[2, 7])
    loaded = load_engine_model(save(model, tmp_path))
    assert loaded.model.generation_config.temperature == 0.25
    assert loaded.model.generation_config.eos_token_id == [2, 7]


def test_remote_code_is_never_run(tmp_path):
    from store_checkpoints import edit_config

    save(FAMILIES["phimoe"](), tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(tmp_path, auto_map=names)
    assert type(load_engine_model(tmp_path).model).__name__ == "PhimoeForCausalLM"
