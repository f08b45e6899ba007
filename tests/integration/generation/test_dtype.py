"""The dtype that ``auto`` stands for is what is loaded, described and computed in."""

import json

import pytest
import torch

from families import make_tiny, make_tokenizer
from moeless.bootstrap.serving import dtype_choice
from moeless.bootstrap.serving.engine import start_engine
from moeless.cli.main import run
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.processor import describe_processor
from moeless.engines.transformers.loader import describe_model, load_engine_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "mixtral"
    make_tiny("mixtral").to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(params=["bfloat16", "float32"])
def fastest(request, monkeypatch):
    """The dtype that the processor is said to be fast in."""
    flags = frozenset({"amx_bf16"} if request.param == "bfloat16" else ())
    monkeypatch.setattr("moeless.functions.compute.panels.can_lay_out", lambda _: False)
    processor = describe_processor(machine="x86_64", flags=flags, environment={})
    monkeypatch.setattr(dtype_choice, "this_processor", lambda: processor)
    return request.param


def test_without_somebody_who_chooses_the_checkpoints_own_is_taken(directory):
    assert load_engine_model(directory).spec.expert.dtype == "bfloat16"
    assert describe_model(directory).spec.expert.dtype == "bfloat16"


def test_whoever_chooses_is_asked_for_auto_only_and_obeyed(directory):
    asked = []

    def choose(spec):
        asked.append(spec.expert.dtype)
        return "float32"

    loaded = load_engine_model(directory, choose_dtype=choose)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.spec == describe_model(directory, choose_dtype=choose).spec
    assert loaded.spec.expert.dtype == "float32"
    assert loaded.spec == load_engine_model(directory, dtype="float32").spec
    explicit = load_engine_model(directory, dtype="bfloat16", choose_dtype=choose)
    assert explicit.spec.expert.dtype == "bfloat16"
    assert asked == ["bfloat16"] * 2


def test_the_engine_computes_in_what_the_processor_is_fast_in_and_says_so(directory, fastest):
    said = []
    experts = ExpertsConfig(
        devices=parse_devices("cpu:1"), invoker="inline", policy=PolicyConfig(policy="static")
    )
    running = start_engine(EngineConfig(model=str(directory)), experts, progress=said.append)
    try:
        assert running.experts.spec.expert.dtype == fastest
    finally:
        running.close()
    assert [line for line in said if line.startswith(f"computing in {fastest}: ")]


def test_inspect_says_the_same(directory, fastest, capsys):
    assert run(["inspect", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["dtype"].startswith(f"{fastest}: ")
    assert facts["expert_shape"].endswith(fastest)
