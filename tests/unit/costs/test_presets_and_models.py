from dataclasses import fields

import pytest

from moeless.costs.models import KNOWN_MODELS, known_model
from moeless.costs.presets import DEVICES, device_preset
from moeless.errors import ConfigError


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_every_number_of_a_preset_is_positive_and_names_its_source(device):
    numbers = {f.name for f in fields(device)} - {"name", "source"}
    assert set(device.source) == numbers
    assert all(getattr(device, name) > 0 for name in numbers)
    assert all(device.source.values())


def test_presets_are_found_by_name_and_others_are_refused_with_the_choices():
    assert device_preset("a6000").memory_bytes == 48_000_000_000
    with pytest.raises(ConfigError, match="h200, a6000, cpu"):
        device_preset("h100")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", (32, 8, 2, 4096, 14336)),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", (32, 8, 2, 4096, 14336)),
        ("/models/Mixtral-8x7B-v0.1/", (32, 8, 2, 4096, 14336)),
        ("models--mistralai--Mixtral-8x22B-v0.1", (56, 8, 2, 6144, 16384)),
        ("microsoft/Phi-3.5-MoE-instruct", (32, 16, 2, 4096, 6400)),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", (48, 16, 1, 5120, 8192)),
        ("QWEN/qwen3-30b-a3b-Instruct-2507", (48, 128, 8, 2048, 768)),
        ("allenai/OLMoE-1B-7B-0924", (16, 64, 8, 2048, 1024)),
        ("olmoe", (16, 64, 8, 2048, 1024)),
        ("openai/gpt-oss-20b", (24, 32, 4, 2880, 2880)),
        ("openai/gpt-oss-120b", (36, 128, 4, 2880, 2880)),
        ("deepseek-ai/DeepSeek-V3.1", (58, 256, 8, 7168, 2048)),
        ("demo", (30, 16, 8, 576, 40)),
        ("smollm2-135m-e8-k6-s384", (30, 8, 6, 576, 144)),
        ("smollm2-135m-e32-k12-s768-seed3", (30, 32, 12, 576, 24)),
    ],
)
def test_a_known_model_is_found_under_the_names_it_goes_by(name, shape):
    model = known_model(name)
    assert model is not None
    found = (model.num_layers, model.num_experts, model.top_k)
    assert (*found, model.expert.hidden, model.expert.intermediate) == shape


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mistralai/Mistral-7B",
        "mixtral-8x7",
        "openai/gpt-oss-20bx",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        "smollm2-135m-e0-k0-s0",
        "smollm2-135m-e7-k2-s384",
        "smollm2-135m-e8-k9-s384",
    ],
)
def test_a_model_that_is_not_known_has_no_shape(name):
    assert known_model(name) is None


def test_an_expert_of_mixtral_is_as_large_as_the_paper_says():
    mixtral = known_model("mixtral-8x7b")
    assert mixtral.expert.num_bytes == 352_321_536
    assert mixtral.layer_bytes == 8 * 352_321_536
    assert mixtral.expert_bytes == 32 * mixtral.layer_bytes


def test_names_of_known_models_are_unique_and_find_themselves():
    assert len({model.name for model in KNOWN_MODELS}) == len(KNOWN_MODELS)
    assert all(known_model(model.name) is model for model in KNOWN_MODELS)
