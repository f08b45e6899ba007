"""Wires training, profile and evaluation of predictors to reports that can be printed."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeless.bootstrap.predictors.predictor_history import replay_history
from moeless.bootstrap.reserved_directory import reserved_directory
from moeless.learned.batching import Batching
from moeless.learned.evaluation import Evaluation
from moeless.learned.gate_profile import profile_gates
from moeless.learned.load_predictor import LoadPredictor
from moeless.learned.mean_load import average_load
from moeless.learned.predictor_file import (
    check_replaceable,
    load_predictor,
    recording_digest,
    save_predictor,
)
from moeless.learned.predictor_manifest import PredictorManifest
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows
from moeless.learned.training import Progress, Trainer, original_gates
from moeless.learned.training_options import TrainingOptions
from moeless.learned.transition_table import count_transitions

HISTORIES = ("previous", "ewma")
"""Predictors that look back, shown beside those that look ahead."""

Tell = Callable[[str], None]


def profile(
    shards: GateShards,
    distances: Sequence[int],
    *,
    max_tokens: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Accuracy of copied gates, and similarity of gate inputs.

    Args:
        shards: The recording.
        distances: Distances to ask at.
        max_tokens: The first so many tokens are looked at.
        on_progress: Told how many tokens are done, and of how many.

    Returns:
        A report for JSON; numbers by distance and layer, None where a layer has none.

    Raises:
        ConfigError: The model has too few layers for a distance.
        TraceError: The recording is damaged or too small.
    """
    rows = TokenRows(shards, shards.conversations).first(max_tokens)
    found = profile_gates(shards.gates, rows, distances, on_progress=on_progress)
    return {
        **_describe(shards),
        "tokens": rows.tokens,
        "batch": found.batch,
        "batches": found.batches,
        "distances": {
            str(distance): {
                "load_accuracy": _listed(found.accuracy_nL[n]),
                "token_recall": _listed(found.recall_nL[n]),
                "cosine": _listed(found.cosine_nL[n]),
                "mean_load_accuracy": float(np.nanmean(found.accuracy_nL[n])),
                "mean_token_recall": float(np.nanmean(found.recall_nL[n])),
                "mean_cosine": float(np.nanmean(found.cosine_nL[n])),
            }
            for n, distance in enumerate(found.distances)
        },
    }


def train(
    shards: GateShards,
    options: TrainingOptions,
    out: Path,
    *,
    tell: Tell = lambda _: None,
    on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Train a predictor and save it.

    Args:
        shards: The recording.
        options: How.
        out: Directory of the predictor.
        tell: Told what it will take, before it starts.
        on_progress: Told how far it is.

    Returns:
        A report for JSON.

    Raises:
        ConfigError: Options that do not fit the model or each other, or ``out`` cannot be
            written or holds something else.
        TraceError: The recording is damaged or too small.
    """
    began_s = time.perf_counter()
    check_replaceable(out)
    with reserved_directory(out):
        trainer = Trainer(shards, options)
        memory = trainer.memory
        tell(
            f"{options.method} at distance {options.distance} for up to {memory.layers} layers, "
            f"{memory.group} at a time: about {memory.total_bytes / 2**20:,.0f} MiB of memory "
            f"beside the recording, which is read {memory.passes} times to fit"
        )
        training = trainer.train(on_progress)
        took_s = time.perf_counter() - began_s
        manifest = save_predictor(out, training, options, shards.manifest)
    layers = training.layers
    return {
        **_describe(shards),
        "out": str(out),
        "method": options.method,
        "distance": options.distance,
        "threshold": None if options.all_layers else options.threshold,
        "tokens": dict(manifest.tokens),
        "memory_bytes": memory.total_bytes,
        "predictor_bytes": training.predictor.num_bytes,
        "took_s": took_s,
        "layers_trained": sum(layer.trained for layer in layers),
        "accuracy_before": float(np.mean([layer.accuracy_before for layer in layers])),
        "accuracy_after": float(np.mean([layer.accuracy_after for layer in layers])),
        "layers": [asdict(layer) for layer in layers],
    }


def evaluate(
    directory: Path,
    shards: GateShards,
    *,
    sizes: Sequence[int],
    batching: Batching,
    baselines: bool,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Hold a predictor against recorded tokens and against the baselines.

    Measured on the conversations that training keeps away from fitting; those of other
    recordings are divided the same way, so that baselines have something to be fitted to.

    Args:
        directory: The predictor.
        shards: The recording.
        sizes: Tokens of a batch, several.
        batching: How tokens are put together.
        baselines: Train the large baselines too: a perceptron per layer, and a linear predictor
            from layer inputs where those are recorded.
        on_progress: Told what is being done.

    Returns:
        A report for JSON.

    Raises:
        CheckpointError: The predictor is damaged.
        ConfigError: It is that of another model.
        TraceError: The recording is damaged, or too small for a single batch.
    """
    known = shards.manifest
    predictor, manifest = load_predictor(directory, gates=shards.gates, model=known.model)
    fit, held_out = divide(shards, manifest)
    rows = TokenRows(shards, held_out, reads=predictor.reads)
    evaluation = Evaluation(
        rows,
        layers=known.num_layers,
        experts=known.num_experts,
        distance=predictor.distance,
        sizes=sizes,
        batching=batching,
    )
    evaluation.require_batches()
    asked: dict[str, LoadPredictor] = {f"this ({manifest.method})": predictor}
    asked |= _small_baselines(shards, fit, predictor.distance)
    if baselines:
        asked |= _large_baselines(shards, manifest, on_progress)
    for name, each in asked.items():
        on_progress(name)
        evaluation.add_predictor(name, each)
    for name in HISTORIES:
        evaluation.add_history(name, replay_history(name))
    return {
        **_describe(shards),
        "predictor": str(directory),
        "method": manifest.method,
        "distance": predictor.distance,
        "tokens": rows.tokens,
        "same_recording": manifest.recorded.get("sha256") == recording_digest(known),
        "batching": batching,
        "predictors": {
            name: _scores(evaluation, name, asked.get(name)) for name in evaluation.expected
        },
    }


def divide(
    shards: GateShards, manifest: PredictorManifest
) -> tuple[frozenset[int], frozenset[int]]:
    """Divide a recording as the training of a predictor did.

    Returns:
        Conversations to fit to, and those to judge by.

    Raises:
        TraceError: There are fewer than two conversations.
    """
    return shards.split(manifest.config["held_out"], manifest.config["seed"])


def _small_baselines(
    shards: GateShards, fit: frozenset[int], distance: int
) -> dict[str, LoadPredictor]:
    rows, known = TokenRows(shards, fit), shards.manifest
    return {
        "gate reuse": original_gates(shards.gates, distance),
        "transition table": count_transitions(shards.gates, rows, distance),
        "mean load": average_load(
            rows, layers=known.num_layers, experts=known.num_experts, distance=distance
        ),
    }


def _large_baselines(
    shards: GateShards, manifest: PredictorManifest, on_progress: Callable[[str], None]
) -> dict[str, LoadPredictor]:
    options = TrainingOptions(
        distance=manifest.distance,
        method="mlp",
        all_layers=True,
        held_out=manifest.config["held_out"],
        seed=manifest.config["seed"],
    )
    found: dict[str, LoadPredictor] = {}

    def add(name: str, options: TrainingOptions) -> None:
        found[name] = (
            Trainer(shards, options)
            .train(lambda what, done, total: on_progress(f"{name}: {what} {done}/{total}"))
            .predictor
        )

    add("mlp", options)
    if shards.manifest.config.get("layer_inputs"):
        add("layer input", replace(options, method="ridge", reads="layer_input"))
    return found


def _scores(evaluation: Evaluation, name: str, predictor: LoadPredictor | None) -> dict[str, Any]:
    recall = evaluation.recall.get(name)
    batches = {}
    for size in evaluation.sizes:
        scores = evaluation.scores(name, size)
        if scores is not None:
            layers = evaluation.layer_scores(name, size)
            batches[str(size)] = {
                **asdict(scores),
                "load_accuracy_by_layer": {
                    str(layer): each.load_accuracy
                    for layer, each in layers.items()
                    if each is not None
                },
            }
    return {
        "token_recall": None if recall is None else float(recall.mean()),
        "num_bytes": None if predictor is None else predictor.num_bytes,
        "batches": batches,
    }


def _describe(shards: GateShards) -> dict[str, Any]:
    known = shards.manifest
    return {
        "model": known.model,
        "layers_in_model": known.num_layers,
        "experts": known.num_experts,
        "top_k": known.top_k,
        "prompts": known.prompts.get("source"),
    }


def _listed(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]
