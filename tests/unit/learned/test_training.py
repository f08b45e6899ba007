"""Training from a recording: which layers, from which tokens, in how much memory."""

import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import (  # noqa: E402 - after the skip
    LAYERS,
    RULES,
    draw_states,
    record_tokens,
)
from moeless.errors import ConfigError, TraceError  # noqa: E402
from moeless.learned.gradient import DescentOptions  # noqa: E402
from moeless.learned.mlp import Mlp  # noqa: E402
from moeless.learned.shards import GateShards  # noqa: E402
from moeless.learned.token_rows import TokenRows  # noqa: E402
from moeless.learned.training import Trainer  # noqa: E402
from moeless.learned.training_options import TrainingOptions, estimate_memory  # noqa: E402

SHORT = DescentOptions(epochs=8, minibatch=64)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Layer 2 sees what layer 1 saw; all others see it rotated."""
    directory = record_tokens(tmp_path_factory.mktemp("seen") / "s", noise=0.05, still=(2,))
    return GateShards(directory)


def train(shards, **options):
    return Trainer(shards, TrainingOptions(**options)).train()


def of(training):
    return {layer.layer: layer for layer in training.layers}


@pytest.mark.parametrize("method", ["ridge", "finetune"])
def test_only_layers_below_the_threshold_are_trained(shards, method):
    training = train(shards, method=method, threshold=0.9, descent=SHORT)
    layers = of(training)
    assert {layer for layer, report in layers.items() if report.trained} == {1, 3}
    assert layers[2].accuracy_before == layers[2].accuracy_after > 0.9
    assert layers[1].accuracy_after > layers[1].accuracy_before + 0.05
    predictor = training.predictor
    assert torch.equal(predictor.models[1].weight, shards.gates[2].weight)
    assert predictor.spreads[1] == 0.0


@pytest.mark.parametrize("method", ["finetune", "mlp"])
def test_layers_that_descend_at_once_become_what_they_would_one_after_the_other(shards, method):
    before, found = torch.get_num_threads(), {}
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            trainer = Trainer(
                shards, TrainingOptions(method=method, all_layers=True, descent=SHORT)
            )
            assert trainer.memory.group == threads
            found[threads] = trainer.train()
        finally:
            torch.set_num_threads(before)
    assert found[1].layers == found[3].layers
    for one, other in zip(found[1].predictor.models, found[3].predictor.models, strict=True):
        for name, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[name])


def test_fine_tuning_ends_at_the_threshold(shards):
    loose = of(train(shards, method="finetune", threshold=0.85, descent=SHORT))
    strict = of(train(shards, method="finetune", all_layers=True, descent=SHORT))
    assert loose[1].epochs < strict[1].epochs


def test_all_layers_are_trained_when_asked_and_none_gets_worse(shards):
    training = train(shards, all_layers=True, threshold=0.0)
    layers = of(training)
    assert all(layers[layer].trained for layer in (1, 3))
    assert all(report.accuracy_after > 0.95 for report in layers.values())
    assert layers[2].accuracy_after >= layers[2].accuracy_before - 0.01
    assert set(training.predictor.errors) == {1, 2, 3}
    error = training.predictor.error(0)
    assert error.mean_at(16) > error.mean_at(256) > 0.0


def test_a_threshold_that_all_reach_trains_nothing(shards):
    training = train(shards, threshold=0.0)
    assert not any(report.trained for report in training.layers)


def test_further_ahead_is_trained_as_well(shards):
    training = train(shards, distance=3)
    (report,) = training.layers
    assert report.layer == 3
    assert report.accuracy_after > 0.9
    assert training.predictor.predict(0, draw_states(5)[:, 0]).sum() == pytest.approx(10.0)
    assert training.predictor.predict(1, draw_states(5)[:, 0]) is None


def test_a_perceptron_per_layer_is_much_larger(shards):
    mlp = train(shards, method="mlp", all_layers=True, descent=SHORT)
    assert all(isinstance(model, Mlp) for model in mlp.predictor.models[::2])
    assert mlp.predictor.num_bytes > 3 * train(shards, all_layers=True).predictor.num_bytes
    assert of(mlp)[1].accuracy_after > of(mlp)[1].accuracy_before


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_scoring_rule_is_refitted(rule, dtype, tmp_path):
    directory = record_tokens(tmp_path / "s", rule=rule, conversations=12, dtype=dtype)
    training = train(GateShards(directory), all_layers=True)
    for report in training.layers:
        assert report.accuracy_after > 0.95 > report.accuracy_before
    assert all(model.rule == rule for model in training.predictor.models)


def test_the_size_of_groups_does_not_change_the_result(shards):
    needed = Trainer(shards, TrainingOptions()).memory
    assert (needed.group, needed.passes) == (LAYERS - 1, 1)
    tight = TrainingOptions(memory_bytes=needed.shared_bytes + needed.layer_bytes)
    trainer = Trainer(shards, tight)
    assert (trainer.memory.group, trainer.memory.passes) == (1, LAYERS - 1)
    at_once = train(shards)
    for one, other in zip(trainer.train().predictor.models, at_once.predictor.models, strict=True):
        assert torch.equal(one.weight, other.weight)


def test_training_is_repeatable_and_follows_the_seed(shards):
    first, again, other = (train(shards, all_layers=True, seed=seed) for seed in (1, 1, 2))
    assert first.layers == again.layers
    assert first.layers != other.layers


def test_tokens_to_fit_are_bounded(shards):
    training = train(shards, max_tokens=600)
    assert training.fit_tokens == 600
    assert training.validation_tokens >= 256


def test_progress_is_told(shards):
    told = []
    Trainer(shards, TrainingOptions(all_layers=True)).train(lambda *step: told.append(step))
    assert {what for what, _, _ in told} == {"copied gates", "fitting", "held-out conversations"}
    assert all(0 <= done <= total for _, done, total in told)
    assert told[-1][1] == told[-1][2]


def test_too_few_tokens_say_how_many_are_needed(tmp_path):
    directory = record_tokens(tmp_path / "s", conversations=5, tokens=60, decoded=9)
    with pytest.raises(TraceError, match=r"holds 300 tokens of 5 .* record about \d"):
        Trainer(GateShards(directory), TrainingOptions())


def test_the_distance_must_fit_the_model(shards):
    with pytest.raises(ConfigError, match=f"distance {LAYERS} .* use at most {LAYERS - 1}"):
        Trainer(shards, TrainingOptions(distance=LAYERS))


def test_layer_inputs_must_have_been_recorded(shards):
    with pytest.raises(TraceError, match="--layer-inputs"):
        Trainer(shards, TrainingOptions(reads="layer_input"))


def test_a_linear_predictor_reads_layer_inputs(tmp_path):
    shards = GateShards(record_tokens(tmp_path / "s", layer_inputs=True))
    training = train(shards, reads="layer_input", all_layers=True)
    assert training.predictor.reads == "layer_input"
    assert all(report.accuracy_after > 0.95 for report in training.layers)


class TestMemory:
    def test_mixtral_needs_what_its_sums_take(self):
        shape = {"layers": 31, "hidden": 4096, "experts": 8, "tokens": 32_768}
        estimate = estimate_memory(TrainingOptions(), **shape)
        square = 4097 * 4097 * 8
        assert estimate.layer_bytes == square + 4097 * 8 * 8
        assert estimate.group == (2**31 - estimate.shared_bytes) // estimate.layer_bytes > 1
        assert estimate.total_bytes <= 2**31
        assert estimate.passes == -(-31 // estimate.group)

    def test_as_many_layers_descend_at_once_as_memory_holds(self):
        shape = {"layers": 29, "hidden": 576, "experts": 16, "tokens": 8_000, "at_once": 4}
        roomy = estimate_memory(TrainingOptions(method="mlp"), **shape)
        assert roomy.group == 4
        for room in (1, 2, 3):
            limit = roomy.shared_bytes + room * roomy.layer_bytes
            options = TrainingOptions(method="mlp", memory_bytes=limit)
            assert estimate_memory(options, **shape).group == room

    @pytest.mark.parametrize("method", ["ridge", "finetune", "mlp"])
    def test_too_little_memory_for_one_layer_is_refused(self, method):
        options = TrainingOptions(method=method, memory_bytes=2**20)
        with pytest.raises(ConfigError, match="fitting one layer needs"):
            estimate_memory(options, layers=31, hidden=4096, experts=8, tokens=32_768)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": 0}, "distance 0"),
        ({"method": "guess"}, "'guess' is unknown"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"penalties": (0.0,)}, "penalties"),
        ({"method": "finetune", "reads": "layer_input"}, "use ridge"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainingOptions(**options)


def test_rows_are_those_of_the_conversations_shard_by_shard(shards):
    rows = TokenRows(shards, {3, 17})
    assert len(shards) > 1
    assert rows.tokens == 300
    assert set(rows.conversation.tolist()) == {3, 17}
    ids = torch.cat([chunk.topk_ids(1) for chunk in rows])
    states = torch.cat([chunk.states(1) for chunk in rows])
    chosen = torch.topk(shards.gates[1].logits(states), 2, dim=1).indices.sort(dim=1).values
    assert torch.equal(ids, chosen)
    assert rows.sample(40).tokens == rows.first(40).tokens == 40


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
def test_a_training_of_all_layers_can_be_limited_to_what_a_threshold_gives(shards, threshold):
    trainer = Trainer(shards, TrainingOptions(all_layers=True))
    limited = trainer.limit(trainer.train(), threshold)
    direct = train(shards, threshold=threshold)
    assert limited.layers == direct.layers
    assert limited.predictor.spreads == direct.predictor.spreads
    for ours, theirs in zip(limited.predictor.models, direct.predictor.models, strict=True):
        assert torch.equal(ours.weight, theirs.weight)


def test_only_gates_of_all_layers_in_closed_form_can_be_limited(shards):
    trainer = Trainer(shards, TrainingOptions(method="finetune", all_layers=True, descent=SHORT))
    with pytest.raises(ValueError, match="only re-fitted gates"):
        trainer.limit(trainer.train(), 0.8)
