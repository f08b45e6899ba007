"""Predictors on disk: what is saved is loaded, and what does not fit is named."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from fakes.gate_recordings import RULES, draw_gates, draw_states, record_tokens  # noqa: E402
from moeless.errors import CheckpointError, ConfigError  # noqa: E402
from moeless.learned.gradient import DescentOptions  # noqa: E402
from moeless.learned.predictor_file import (  # noqa: E402
    TENSOR_FILE,
    check_replaceable,
    load_predictor,
    recording_digest,
    save_predictor,
)
from moeless.learned.shards import MANIFEST_FILE, GateShards  # noqa: E402
from moeless.learned.training import Trainer  # noqa: E402
from moeless.learned.training_options import TrainingOptions  # noqa: E402


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return GateShards(record_tokens(tmp_path_factory.mktemp("seen") / "s", noise=0.1))


@pytest.fixture
def saved(shards, tmp_path):
    """A saved predictor of distance 2."""
    return save(shards, tmp_path / "p", distance=2)


def save(shards, directory, **options):
    options = TrainingOptions(**options, descent=DescentOptions(epochs=3))
    save_predictor(directory, Trainer(shards, options).train(), options, shards.manifest)
    return directory


@pytest.mark.parametrize(
    "options", [{}, {"method": "mlp", "all_layers": True}, {"threshold": 0.0, "distance": 3}]
)
def test_what_is_loaded_predicts_the_same(shards, options, tmp_path):
    options = TrainingOptions(**options, descent=DescentOptions(epochs=3))
    training = Trainer(shards, options).train()
    written = save_predictor(tmp_path / "p", training, options, shards.manifest)
    loaded, manifest = load_predictor(
        tmp_path / "p", gates=shards.gates, distance=options.distance
    )
    assert manifest == replace(
        written, layers=manifest.layers, config=manifest.config, layer_ids=manifest.layer_ids
    )
    states = draw_states(50, seed=5)
    for layer in range(len(training.predictor.models)):
        expected = training.predictor.predict(layer, states[:, layer])
        assert (loaded.predict(layer, states[:, layer]) == expected).all()
        assert loaded.error(layer).mean_at(64) == training.predictor.error(layer).mean_at(64)
    assert loaded.num_bytes == training.predictor.num_bytes
    assert manifest.tokens["fit"] == training.fit_tokens
    assert manifest.recorded["sha256"] == recording_digest(shards.manifest)
    assert [layer.accuracy_after for layer in manifest.layers] == [
        layer.accuracy_after for layer in training.layers
    ]


def test_corrections_are_kept(tmp_path):
    shards = GateShards(record_tokens(tmp_path / "s", rule=RULES["sigmoid_group"]))
    loaded, _ = load_predictor(save(shards, tmp_path / "p"), gates=shards.gates)
    for model, gate in zip(loaded.models, shards.gates[1:], strict=True):
        assert torch.equal(model.correction, gate.correction)


def test_it_replaces_what_was_there(shards, saved):
    save(shards, saved, distance=1)
    assert load_predictor(saved)[0].distance == 1


def test_another_model_is_refused_by_its_shape(saved):
    with pytest.raises(ConfigError, match=r"trained for tiny .* but other has 3 MoE layers"):
        load_predictor(saved, gates=draw_gates(layers=3), model="other")


def test_another_model_is_refused_by_its_gates(saved):
    with pytest.raises(ConfigError, match=r"other gates \(tiny\) than those of other"):
        load_predictor(saved, gates=draw_gates(seed=1), model="other")


def test_another_distance_is_refused(saved):
    with pytest.raises(ConfigError, match="looks 2 layers ahead, not 1; use --distance 2"):
        load_predictor(saved, distance=1)


def test_numbers_that_are_not_finite_are_refused(saved):
    tensors = load_file(saved / TENSOR_FILE)
    tensors["weight.3"][0, 0] = float("nan")
    save_file(tensors, saved / TENSOR_FILE)
    with pytest.raises(CheckpointError, match=r"weight.3 holds numbers that are not finite"):
        load_predictor(saved)


def test_changed_numbers_are_refused(saved):
    tensors = load_file(saved / TENSOR_FILE)
    tensors["weight.3"][0, 0] += 1.0
    save_file(tensors, saved / TENSOR_FILE)
    with pytest.raises(CheckpointError, match="not the file that its manifest was written for"):
        load_predictor(saved)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_truncated_tensors_are_refused(saved, kept):
    content = (saved / TENSOR_FILE).read_bytes()
    (saved / TENSOR_FILE).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_predictor(saved)


@pytest.mark.parametrize("name", [TENSOR_FILE, MANIFEST_FILE])
def test_missing_files_are_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        load_predictor(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "moeless-gate-inputs"}, "not that of a predictor"),
        ({"version": 2}, "version 2; this moeless reads version 1"),
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 13}, "expected"),
        ({"layers": []}, "layers are not 2 to 3"),
        ({"layers": [{"layer": 2}]}, "incomplete or changed"),
        ({"router_rule": {"kind": "softmax_topk"}}, "incomplete or changed"),
        ({"distance": "2"}, "distance is '2'"),
    ],
)
def test_a_changed_manifest_is_refused(saved, change, message):
    path = saved / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_predictor(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_an_unreadable_manifest_is_refused(saved, text):
    (saved / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is not"):
        load_predictor(saved)


def test_a_directory_that_cannot_be_written_is_named(shards, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(shards, tmp_path / "file" / "p")


def test_only_what_is_a_predictor_or_nothing_may_be_replaced(shards, saved, tmp_path):
    check_replaceable(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")
    check_replaceable(saved)
    (saved / MANIFEST_FILE).unlink()
    check_replaceable(saved)  # as a writer leaves it that was interrupted
    for other in (tmp_path, shards.directory):
        with pytest.raises(ConfigError, match="holds something else than a predictor"):
            check_replaceable(other)
