"""``moeless serve --predictor``: what serves, and what is refused in one line."""

import json
import shutil
from pathlib import Path

import httpx
import pytest

from effort import PATIENCE_S
from fakes.trained_predictors import train_predictor
from families import FAMILIES, VOCABULARY, make_tokenizer
from moeless.cli.main import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory) -> Path:
    """A predictor of the served model."""
    folder = tmp_path_factory.mktemp("predictor")
    return train_predictor(model_dir, folder, vocabulary=VOCABULARY)


@pytest.fixture
def fails(capsys):
    """Run a command that must fail; returns the one line that it printed."""

    def fails(*arguments):
        capsys.readouterr()
        assert run(["serve", *map(str, arguments)]) == 2
        lines = capsys.readouterr().err.splitlines()
        progress = ("moeless: loading", "moeless: starting", "moeless: computing")
        lines = [line for line in lines if not line.startswith(progress)]
        assert len(lines) == 1, lines
        assert lines[0].startswith("moeless: error: ")
        return lines[0]

    return fails


def test_a_trained_predictor_serves_and_is_named(model_dir, trained, start_serving):
    options = ["--devices", "cpu:2", "--dtype", "float32", "--predictor", str(trained)]
    server = start_serving(model_dir, *options)
    body = {
        "model": model_dir.name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        answers = [client.post("/v1/chat/completions", json=body) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        experts = client.get("/moeless/experts").json()
        metrics = client.get("/metrics").text
    assert experts["predictor"] == {
        "kind": "trained",
        "distance": 1,
        "source": str(trained),
        "swaps": 0,
    }
    assert experts["forecast_s"]["count"] > 0
    assert all(0.5 < accuracy <= 1.0 for accuracy in experts["prediction_accuracy"][1:])
    assert 'moeless_predictor_info{kind="trained",model="tiny-granite"} 1.0' in metrics
    assert 'moeless_prediction_accuracy{layer_group="1-1"' in metrics


class TestRefused:
    def test_what_is_neither_a_name_nor_a_directory(self, fails, model_dir, tmp_path):
        line = fails(model_dir, "--predictor", tmp_path / "nothing")
        assert "nothing' is no directory" in line
        assert "gate, auto, off, ewma, previous" in line

    def test_a_directory_without_a_predictor(self, fails, model_dir, tmp_path):
        assert "has no manifest.json" in fails(model_dir, "--predictor", tmp_path)

    def test_another_distance(self, fails, model_dir, trained):
        line = fails(model_dir, "--predictor", trained, "--distance", 2)
        assert "looks 1 layers ahead, not 2" in line
        assert "--distance 1" in line

    def test_a_policy_that_would_not_use_it(self, fails, model_dir, trained):
        for predictor in (trained, "auto"):
            line = fails(model_dir, "--predictor", predictor, "--policy", "static")
            assert "policy static plans without forecasts" in line

    def test_a_predictor_of_another_model(self, fails, trained, tmp_path):
        other = tmp_path / "other"
        FAMILIES["mixtral"]().save_pretrained(other)
        make_tokenizer().save_pretrained(other)
        line = fails(other, "--predictor", trained)
        assert "was trained for tiny-granite" in line
        assert "moeless predictor train" in line

    def test_a_damaged_file(self, fails, model_dir, trained, tmp_path):
        damaged = tmp_path / "damaged"
        shutil.copytree(trained, damaged)
        path = damaged / "predictor.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "truncated or damaged" in fails(model_dir, "--predictor", damaged)
        (damaged / "manifest.json").write_text("{")
        assert "not readable JSON" in fails(model_dir, "--predictor", damaged)

    def test_one_that_reads_layer_inputs(self, fails, model_dir, trained, tmp_path):
        other = tmp_path / "reads"
        shutil.copytree(trained, other)
        manifest = json.loads((other / "manifest.json").read_text())
        (other / "manifest.json").write_text(json.dumps(manifest | {"reads": "layer_input"}))
        assert "reads what enters a layer" in fails(model_dir, "--predictor", other)
