"""``moeless predictor``, from a tiny checkpoint to a trace that replay uses."""

import json
import sys
from dataclasses import replace
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import numpy as np  # noqa: E402 - the path to the shared modules comes first
import pytest  # noqa: E402

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

from fakes.gate_recordings import record_tokens  # noqa: E402 - after the skip
from families import FAMILIES, make_tokenizer  # noqa: E402
from moeless.cli.main import run  # noqa: E402
from moeless.learned.predictor_file import load_predictor  # noqa: E402
from moeless.learned.shards import GateShards, ShardWriter, fingerprint_gates  # noqa: E402
from moeless.learned.shards.files import sha256_of  # noqa: E402
from moeless.workloads.routing_trace import read_trace  # noqa: E402

pytestmark = pytest.mark.slow

WORDS = [
    "rain",
    "spain",
    "plain",
    "songs",
    "stages",
    "times",
    "light",
    "seven",
    "eight",
    "down",
    "river",
    "stone",
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Eighty prompts of a few words each."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    lines = (" ".join(generator.choice(WORDS, size=7)) for _ in range(80))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def record(prompts, tmp_path_factory):
    """Record a family's tiny checkpoint; returns the checkpoint, the trace and the shards."""

    def record(family):
        folder = tmp_path_factory.mktemp(family)
        FAMILIES[family]().save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        arguments = [
            *("record", folder / "model", "--prompts", prompts, "--max-tokens", 12),
            *("--out", folder / "run.npz", "--gate-inputs", folder / "seen", "--topk-ids"),
            *("--threads", 1, "--concurrency", 8),
        ]
        assert run([str(argument) for argument in arguments]) == 0
        return folder / "model", folder / "run.npz", folder / "seen"

    return record


@pytest.fixture(scope="module")
def recorded(record):
    return record("gpt_oss")


@pytest.fixture(scope="module")
def trained(recorded, tmp_path_factory):
    directory = tmp_path_factory.mktemp("predictors") / "ahead1"
    assert predictor("train", recorded[2], "--out", directory, "--all-layers") == 0
    return directory


def predictor(*arguments):
    return run(["predictor", *(str(argument) for argument in arguments)])


@pytest.fixture
def report(capsys):
    """Run a command with --json; returns what it printed."""

    def report(*arguments):
        capsys.readouterr()
        assert predictor(*arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return report


@pytest.fixture
def fails(capsys):
    """Run a command that must fail; returns the one line that it printed."""

    def fails(*arguments):
        capsys.readouterr()
        assert predictor(*arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("moeless: error: ")
        return lines[0]

    return fails


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_recorded_trained_and_served(family, record, tmp_path):
    _, _, seen = record(family)
    shards = GateShards(seen)
    assert predictor("train", seen, "--out", tmp_path / "p", "--all-layers") == 0
    loaded, manifest = load_predictor(tmp_path / "p", gates=shards.gates, distance=1)
    assert any(layer.trained for layer in manifest.layers)
    assert np.mean([layer.accuracy_after for layer in manifest.layers]) > np.mean(
        [layer.accuracy_before for layer in manifest.layers]
    )
    states = next(iter(shards)).gate_input[:10, 0]
    load_E = loaded.predict(0, states.reshape(2, 5, -1))
    assert load_E.sum() == pytest.approx(10 * shards.manifest.top_k)


def test_the_profile_has_every_layer_and_distance(recorded, report):
    found = report("profile", recorded[2], "--distances", "1,2")
    layers = found["layers_in_model"]
    for distance in (1, 2):
        each = found["distances"][str(distance)]
        for name in ("load_accuracy", "token_recall", "cosine"):
            assert len(each[name]) == layers
            assert [value is None for value in each[name]] == [
                layer < distance for layer in range(layers)
            ]


def test_training_reports_what_it_did(recorded, report, tmp_path):
    found = report("train", recorded[2], "--out", tmp_path / "p", "--threshold", "1.0")
    assert found["accuracy_after"] > found["accuracy_before"]
    assert found["layers_trained"] == sum(layer["trained"] for layer in found["layers"])
    assert found["predictor_bytes"] == load_predictor(tmp_path / "p")[0].num_bytes
    assert found["memory_bytes"] > 0


def test_a_model_is_recorded_first(recorded, prompts, report, tmp_path):
    model, _, _ = recorded
    kept = tmp_path / "seen"
    arguments = ("profile", model, "--prompts", prompts, "--gate-inputs", kept)
    found = report(*arguments, "--max-recorded-tokens", 400, "--distances", 1)
    assert GateShards(kept).manifest.tokens == found["tokens"] >= 350


def test_tables_are_printed(recorded, trained, capsys, tmp_path):
    _, _, seen = recorded
    assert predictor("profile", seen, "--distances", 1) == 0
    assert "cosine d=1" in capsys.readouterr().out
    assert predictor("train", seen, "--out", tmp_path / "p", "--method", "finetune") == 0
    printed = capsys.readouterr()
    assert "layers trained in" in printed.out
    assert "MiB of memory beside the recording" in " ".join(printed.err.split())
    assert predictor("evaluate", trained, seen, "--batches", "16") == 0
    assert "this (ridge)" in capsys.readouterr().out


def test_all_baselines_stand_beside_the_predictor(recorded, trained, report):
    found = report("evaluate", trained, recorded[2], "--batches", "8,32", "--large-baselines")
    assert set(found["predictors"]) == {
        *("this (ridge)", "gate reuse", "transition table", "mean load", "mlp"),
        *("previous", "ewma"),
    }
    assert found["same_recording"]
    for each in found["predictors"].values():
        assert set(each["batches"]) == {"8", "32"}
        for scores in each["batches"].values():
            assert 0.0 <= scores["load_accuracy"] <= 1.0
            assert set(scores["load_accuracy_by_layer"]) == {
                str(layer) for layer in range(1, found["layers_in_model"])
            }
    ours, copied = (
        found["predictors"][name]["batches"]["32"]["load_accuracy"]
        for name in ("this (ridge)", "gate reuse")
    )
    assert ours > copied


class TestApply:
    def test_the_trace_of_the_run_gets_forecasts(self, recorded, trained, tmp_path):
        _, routing, seen = recorded
        out = tmp_path / "out.npz"
        assert predictor("apply", trained, seen, "--routing", routing, "--out", out) == 0
        before, after = read_trace(routing), read_trace(out)
        assert (after.loads_NLE == before.loads_NLE).all()
        assert after.meta.predictor["distance"] == 1
        sums = after.predicted_NLE.sum(axis=-1)
        assert np.allclose(sums, after.loads_NLE.sum(axis=-1), rtol=1e-5)

    def test_forecasts_are_those_of_the_tokens_in_a_step(self, recorded, trained, tmp_path):
        _, routing, seen = recorded
        out = tmp_path / "out.npz"
        assert predictor("apply", trained, seen, "--routing", routing, "--out", out) == 0
        trace, shards = read_trace(out), GateShards(seen)
        loaded, _ = load_predictor(trained)
        everything = list(shards)
        ids = torch.cat([shard.topk_ids for shard in everything]).sort(dim=-1).values
        states = torch.cat([shard.gate_input for shard in everything])
        for step in (0, 3, len(trace) - 1):
            first, stop = trace.topk_offsets[step : step + 2]
            wanted = np.sort(trace.topk_ids_TLK[first:stop], axis=-1)
            rows = [
                int((ids == torch.from_numpy(token)).all(dim=-1).all(dim=-1).nonzero()[0, 0])
                for token in wanted
            ]
            expected_E = loaded.predict(0, states[rows, 0])
            assert np.allclose(trace.predicted_NLE[step, 1], expected_E, atol=1e-3)

    def test_the_first_layers_get_the_step_before(self, recorded, trained, tmp_path):
        _, routing, seen = recorded
        out = tmp_path / "out.npz"
        assert predictor("apply", trained, seen, "--routing", routing, "--out", out) == 0
        trace = read_trace(out)
        before = trace.loads_NLE[:-1, 0] / trace.loads_NLE[:-1, 0].sum(axis=-1, keepdims=True)
        after = trace.predicted_NLE[1:, 0]
        assert np.allclose(after / after.sum(axis=-1, keepdims=True), before, atol=1e-5)
        assert np.ptp(trace.predicted_NLE[0, 0]) == 0.0

    @pytest.mark.parametrize("batching", ["recorded", "mixed", "decode"])
    def test_without_a_trace_steps_are_made_of_what_was_not_fitted(
        self, recorded, trained, batching, tmp_path
    ):
        out = tmp_path / "out.npz"
        arguments = ("apply", trained, recorded[2], "--out", out, "--batch", 4)
        assert predictor(*arguments, "--batching", batching) == 0
        trace = read_trace(out)
        _, held_out = GateShards(recorded[2]).split(0.2, 0)
        tokens = sum(
            int(np.isin(shard.conversation.numpy(), list(held_out)).sum())
            for shard in GateShards(recorded[2])
        )
        assert 0 < trace.tokens_N.sum() <= tokens
        if batching == "decode":
            assert (trace.decode_tokens_N == trace.tokens_N).all()

    def test_replay_uses_the_forecasts(self, recorded, trained, tmp_path):
        out, figures = tmp_path / "out.npz", tmp_path / "out.json"
        assert predictor("apply", trained, recorded[2], "--out", out, "--batch", 8) == 0
        arguments = [
            *("replay", "--routing", out, "--prediction", "recorded", "--devices", 2),
            *("--policies", "moeless", "--expert-shape", "32x16", "--json", figures),
        ]
        assert run([str(argument) for argument in arguments]) == 0
        report = json.loads(figures.read_text(encoding="utf-8"))
        assert report["config"]["prediction"] == "recorded"

    def test_a_trace_of_another_run_is_refused(self, recorded, trained, fails, tmp_path):
        _, routing, _ = recorded
        other = _same_shape(recorded[2], tmp_path / "other")
        error = fails("apply", trained, other, "--out", tmp_path / "o.npz", "--routing", routing)
        assert "trained for other gates" in error

    def test_a_trace_without_expert_ids_is_refused(self, recorded, trained, fails, tmp_path):
        plain = tmp_path / "plain.npz"
        assert predictor("apply", trained, recorded[2], "--out", plain, "--batch", 8) == 0
        arguments = ("apply", trained, recorded[2], "--out", tmp_path / "o.npz")
        assert "--topk-ids" in fails(*arguments, "--routing", plain)

    def test_the_trace_is_not_overwritten(self, recorded, trained, fails):
        _, routing, seen = recorded
        assert "overwrite" in fails("apply", trained, seen, "--routing", routing, "--out", routing)

    def test_steps_larger_than_the_recording_are_refused(self, recorded, trained, fails, tmp_path):
        arguments = ("apply", trained, recorded[2], "--out", tmp_path / "o.npz")
        assert "use smaller steps" in fails(*arguments, "--batch", 100_000)


class TestErrors:
    def test_another_model_is_named(self, trained, fails, tmp_path):
        other = record_tokens(tmp_path / "s", model="another", conversations=4)
        assert "another has 4 MoE layers" in fails("evaluate", trained, other)

    def test_a_recording_that_is_none_is_named(self, trained, fails, tmp_path):
        assert "has no manifest.json" in fails("evaluate", trained, tmp_path)
        assert "holds no recorded gate inputs" in fails("profile", tmp_path)
        missing = fails("train", tmp_path / "nothing", "--out", tmp_path / "p")
        assert "holds no recorded gate inputs" in missing

    def test_a_predictor_that_is_none_is_named(self, recorded, fails, tmp_path):
        assert "moeless predictor train wrote" in fails("evaluate", tmp_path, recorded[2])

    def test_too_few_tokens_are_counted(self, fails, tmp_path):
        small = record_tokens(tmp_path / "s", conversations=3, tokens=60)
        error = fails("train", small, "--out", tmp_path / "p")
        assert "record about" in error
        assert not (tmp_path / "p").exists()

    def test_inputs_that_are_not_finite_are_named(self, fails, tmp_path):
        seen = record_tokens(tmp_path / "s")
        path = seen / "shard-00000.safetensors"
        before = sha256_of(path)
        tensors = load_file(path)
        tensors["gate_input"][5, 2, 0] = float("nan")
        save_file(tensors, path)
        manifest = seen / "manifest.json"
        manifest.write_text(manifest.read_text().replace(before, sha256_of(path)))
        assert "not finite in layer 2, token 5" in fails("train", seen, "--out", tmp_path / "p")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--distance", 99), "use at most"),
            (("--memory", "1KB"), "fitting one layer needs"),
            (("--memory", "lots"), "--memory"),
        ],
    )
    def test_wrong_options_are_named(self, recorded, fails, arguments, message, tmp_path):
        assert message in fails("train", recorded[2], "--out", tmp_path / "p", *arguments)

    @pytest.mark.parametrize("value", ["0", "1,x", ""])
    def test_wrong_lists_are_named(self, recorded, fails, value):
        assert "--distances" in fails("profile", recorded[2], "--distances", value)

    def test_a_file_is_no_directory_for_a_predictor(self, recorded, fails, tmp_path):
        (tmp_path / "file").write_text("")
        assert "is a file" in fails("train", recorded[2], "--out", tmp_path / "file")


def _same_shape(seen, directory):
    """A recording of other gates of the same shape."""
    shards = GateShards(seen)
    gates = [gate._replace(weight=-gate.weight) for gate in shards.gates]
    manifest = replace(shards.manifest, gates_sha256=fingerprint_gates(gates))
    with ShardWriter(directory, manifest, gates) as writer:
        for shard in shards:
            writer.add(shard)
    return directory
