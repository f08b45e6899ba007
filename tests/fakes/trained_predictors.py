"""Predictors trained in seconds from what a tiny checkpoint computes for random tokens."""

from pathlib import Path

import torch

from moeless.bootstrap.recording.gate_inputs import make_manifest
from moeless.bootstrap.serving.experts import start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.engines.transformers.gate_access import find_gates
from moeless.engines.transformers.loader import load_engine_model
from moeless.learned.predictor_file import save_predictor
from moeless.learned.shards import GateShards, Shard, ShardWriter
from moeless.learned.training import Trainer
from moeless.learned.training_options import TrainingOptions

CONVERSATIONS, TOKENS = 24, 96


def train_predictor(checkpoint: Path, folder: Path, *, vocabulary: int, distance: int = 1) -> Path:
    """Train a predictor of all layers of a checkpoint; returns its directory."""
    record_random_tokens(checkpoint, folder / "seen", vocabulary=vocabulary)
    shards = GateShards(folder / "seen")
    options = TrainingOptions(distance=distance, all_layers=True)
    training = Trainer(shards, options).train()
    save_predictor(folder / "trained", training, options, shards.manifest)
    return folder / "trained"


def record_random_tokens(checkpoint: Path, directory: Path, *, vocabulary: int) -> None:
    """Have a checkpoint compute random prompts, and keep what enters its gates."""
    ids = torch.randint(
        3, vocabulary, (CONVERSATIONS, TOKENS), generator=torch.Generator().manual_seed(5)
    )
    states, chosen = {}, {}

    def observe(layer, ids_TK, x_TH):
        states[layer] = x_TH.clone()
        chosen[layer] = torch.from_numpy(ids_TK.copy()).short()

    loaded = load_engine_model(checkpoint)
    config = ExpertsConfig(
        devices=parse_devices("cpu:1"),
        invoker="inline",
        policy=PolicyConfig(policy="static", predictor="previous"),
    )
    runtime = start_experts(loaded, config)
    try:
        runtime.dispatcher.observe_choices(observe)
        with torch.inference_mode():
            loaded.model(input_ids=ids)
    finally:
        runtime.close()
    gates = find_gates(loaded.model, loaded.spec.layer_ids)
    manifest = make_manifest(loaded.spec, gates, prompts={"source": "random"}, config={})
    layers = range(loaded.spec.num_layers)
    with ShardWriter(directory, manifest, gates) as writer:
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
