"""Predictors that were trained, or learn while they serve, change no output token."""

import numpy as np
import pytest
import torch
from equality_reference import (
    assert_same_answers,
    assert_same_answers_until,
    forward,
    replicas_shared_tokens,
    serving,
)

from families import VOCABULARY
from moeless.bootstrap import live_predictor
from moeless.bootstrap.gate_inputs import make_manifest
from moeless.engines.transformers.gate_access import find_gates
from moeless.learned.live_learning import LiveOptions
from moeless.learned.predictor_file import save_predictor
from moeless.learned.shards import GateShards, Shard, ShardWriter
from moeless.learned.training import Trainer
from moeless.learned.training_options import TrainingOptions

FAMILIES = ("deepseek_v3", "phimoe", "gpt_oss", "mixtral")
"""Each with another rule of choosing experts."""

CONVERSATIONS, TOKENS = 24, 96


@pytest.fixture(scope="module")
def train(reference_of, tmp_path_factory):
    """Train a predictor of a family's checkpoint; returns its directory. Each is made once."""
    made = {}

    def train(family, distance):
        if (family, distance) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{distance}")
            record(reference_of(family), folder / "seen")
            shards = GateShards(folder / "seen")
            options = TrainingOptions(distance=distance, all_layers=True)
            save_predictor(
                folder / "trained", Trainer(shards, options).train(), options, shards.manifest
            )
            made[family, distance] = folder / "trained"
        return made[family, distance]

    return train


def record(reference, directory):
    """Have the served model compute random prompts, and keep what enters its gates."""
    ids = torch.randint(
        3, VOCABULARY, (CONVERSATIONS, TOKENS), generator=torch.Generator().manual_seed(5)
    )
    states, chosen = {}, {}

    def observe(layer, ids_TK, x_TH):
        states[layer] = x_TH.clone()
        chosen[layer] = torch.from_numpy(ids_TK.copy()).short()

    with serving(
        reference.directory, invoker="inline", devices=1, policy="static", predictor="previous"
    ) as served:
        served.runtime.dispatcher.observe_choices(observe)
        forward(served.loaded.model, ids, torch.ones_like(ids))
        spec = served.loaded.spec
        gates = find_gates(served.loaded.model, spec.layer_ids)
        manifest = make_manifest(spec, gates, prompts={"source": "random"}, config={})
        with ShardWriter(directory, manifest, gates) as writer:
            layers = range(spec.num_layers)
            for number in range(CONVERSATIONS):
                rows = slice(number * TOKENS, (number + 1) * TOKENS)
                writer.add(
                    Shard(
                        gate_input=torch.stack([states[n][rows] for n in layers], dim=1),
                        topk_ids=torch.stack([chosen[n][rows] for n in layers], dim=1),
                        conversation=torch.full((TOKENS,), number, dtype=torch.int32),
                        position=torch.arange(TOKENS, dtype=torch.int32),
                        decode=torch.zeros(TOKENS, dtype=torch.uint8),
                        token_ids=ids[number].int(),
                        layer_input=None,
                    )
                )
            writer.close(complete=True)


@pytest.mark.parametrize(
    ("family", "distance"), [*((name, 1) for name in FAMILIES), ("deepseek_v3", 2), ("phimoe", 2)]
)
def test_trained_predictors_give_the_answers_of_transformers(
    family, distance, train, reference_of, splits
):
    with serving(
        reference_of(family).directory,
        invoker="inline",
        devices=3,
        policy="paper",
        predictor=str(train(family, distance)),
    ) as served:
        assert_same_answers_until(
            served, reference_of(family), lambda: replicas_shared_tokens(served, splits)
        )
        snapshot = served.runtime.snapshot()
    assert (snapshot.predictor.kind, snapshot.predictor.distance) == ("trained", distance)
    assert snapshot.forecast_s.count > 0
    assert (snapshot.prediction_accuracy_L[distance:] > 0.5).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_predictors_that_learn_and_are_replaced_give_the_answers_of_transformers(
    family, reference_of, monkeypatch
):
    eager = LiveOptions(held_out_tokens=128, first_fit_tokens=64, chunk_tokens=32, least_gain=1e-9)
    monkeypatch.setattr(live_predictor, "LiveOptions", lambda: eager)
    monkeypatch.setattr(live_predictor, "_ROUND_S", 0.001)
    reference, told = reference_of(family), []
    with serving(
        reference.directory,
        invoker="inline",
        devices=2,
        policy="moeless",
        predictor="auto",
        tell=told.append,
    ) as served:
        state = served.runtime.look_ahead.state
        assert_same_answers_until(served, reference, lambda: state().swaps > 0, attempts=60)
        assert_same_answers(served, reference)
        snapshot = served.runtime.snapshot()
    assert snapshot.predictor.kind == "auto"
    assert len(told) >= snapshot.predictor.swaps > 0
    assert told[0].startswith("predictor replaced (1): ")


@pytest.mark.parametrize("predictor", ["gate", "previous", "ewma", "off"])
def test_accuracy_is_known_for_each_layer_whatever_predicts(predictor, reference_of):
    reference = reference_of("phimoe")
    with serving(
        reference.directory, invoker="inline", devices=2, policy="paper", predictor=predictor
    ) as served:

        def is_known():
            return not np.isnan(served.runtime.snapshot().prediction_accuracy_L).any()

        assert_same_answers_until(served, reference, is_known)
        state = served.runtime.snapshot().predictor
    looks_ahead = predictor == "gate"
    assert state.kind == ("previous" if predictor == "off" else predictor)
    assert state.distance == int(looks_ahead)
