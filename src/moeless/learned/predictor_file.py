"""Trained predictors on disk: ``predictor.safetensors`` and ``manifest.json``."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.errors import CheckpointError, ConfigError, os_reason
from moeless.learned.gate_predictor import Gate
from moeless.learned.mlp import Mlp
from moeless.learned.predictor_manifest import (
    LayerEntry,
    PredictorManifest,
    is_predictor,
    manifest_json,
    read_predictor_manifest,
)
from moeless.learned.shards import MANIFEST_FILE, ShardManifest
from moeless.learned.shards.files import sha256_of, written_durably
from moeless.learned.trained_predictor import LayerModel, TrainedPredictor
from moeless.learned.training import Training
from moeless.learned.training_options import TrainingOptions

TENSOR_FILE = "predictor.safetensors"


def check_replaceable(directory: Path) -> None:
    """Refuse a directory that holds something else, such as the recording that is fitted to.

    Raises:
        ConfigError: It does.
    """
    if not directory.is_dir():
        return
    found = {each.name for each in directory.iterdir()}
    if found <= {TENSOR_FILE}:  # of a writer that was interrupted
        return
    if not is_predictor(directory):
        raise ConfigError(
            f"{directory} holds something else than a predictor; name a directory that is new, "
            f"empty or a predictor's"
        )


def save_predictor(
    directory: Path, training: Training, options: TrainingOptions, recorded: ShardManifest
) -> PredictorManifest:
    """Write a predictor; what is there of another is replaced.

    Args:
        directory: Made if it is missing.
        training: What was trained.
        options: How.
        recorded: Of the recording that it was trained on.

    Returns:
        The manifest, as written.

    Raises:
        ConfigError: The directory cannot be written.
    """
    predictor = training.predictor
    tensors = {
        f"{name}.{predictor.distance + layer}": part.detach().cpu().contiguous().clone()
        for layer, model in enumerate(predictor.models)
        for name, part in model.tensors.items()
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # An interrupted writer leaves no manifest that fits the tensors.
        (directory / MANIFEST_FILE).unlink(missing_ok=True)
        with written_durably(directory / TENSOR_FILE) as path:
            save_file(tensors, path)
        manifest = _describe(
            training, options, recorded, sha256=sha256_of(directory / TENSOR_FILE)
        )
        with written_durably(directory / MANIFEST_FILE) as path:
            path.write_text(manifest_json(manifest), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({os_reason(error)}); choose another directory"
        ) from error
    return manifest


def load_predictor(
    directory: Path,
    *,
    gates: Sequence[Gate] | None = None,
    model: str = "this model",
    distance: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[TrainedPredictor, PredictorManifest]:
    """Read a predictor, and make sure that it is the one that is wanted.

    Args:
        directory: What ``moeless predictor train`` wrote.
        gates: The gates of the model it is to be used with; None does not look.
        model: That model's id, for messages.
        distance: The distance it is to have; None takes its own.
        device: Where its tensors are to be.

    Raises:
        CheckpointError: It is missing, truncated, changed, or holds numbers that are not finite.
        ConfigError: It is that of another model, or of another distance.
    """
    directory = Path(directory)
    manifest = read_predictor_manifest(directory)
    if gates is not None:
        manifest.require_gates(gates, model=model, where=directory)
    if distance is not None:
        manifest.require_distance(distance, where=directory)
    path = directory / TENSOR_FILE
    try:
        tensors = load_file(path, device=str(device))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} has no {TENSOR_FILE}; train it again") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({error}); train the predictor again"
        ) from error
    models = [_build(path, tensors, entry, manifest) for entry in manifest.layers]
    if sha256_of(path) != manifest.sha256:
        raise CheckpointError(
            f"{path} is not the file that its manifest was written for; train the predictor again"
        )
    predictor = TrainedPredictor(
        models,
        manifest.distance,
        hidden=manifest.hidden,
        spreads=[entry.spread for entry in manifest.layers],
        errors={entry.layer: entry.error for entry in manifest.layers if entry.error},
        reads=manifest.reads,
    )
    return predictor, manifest


def recording_digest(recorded: ShardManifest) -> str:
    """Names a recording by its tokens: SHA-256 of its shards' digests, in hexadecimal."""
    joined = "\n".join(entry.sha256 for entry in recorded.shards)
    return hashlib.sha256(joined.encode()).hexdigest()


def _describe(
    training: Training, options: TrainingOptions, recorded: ShardManifest, *, sha256: str
) -> PredictorManifest:
    models = training.predictor.models
    return PredictorManifest(
        model=recorded.model,
        family=recorded.family,
        num_layers=recorded.num_layers,
        num_experts=recorded.num_experts,
        top_k=recorded.top_k,
        hidden=recorded.hidden,
        layer_ids=recorded.layer_ids,
        gates_sha256=recorded.gates_sha256,
        router_rule=recorded.router_rule,
        distance=options.distance,
        method=options.method,
        reads=options.reads,
        tokens={
            "fit": training.fit_tokens,
            "validation": training.validation_tokens,
            "held_out": training.held_out_tokens,
        },
        layers=tuple(
            LayerEntry(
                layer=report.layer,
                kind="mlp" if isinstance(model, Mlp) else "gate",
                trained=report.trained,
                spread=report.spread,
                accuracy_before=report.accuracy_before,
                accuracy_after=report.accuracy_after,
                penalty=report.penalty,
                epochs=report.epochs,
                error=report.error,
            )
            for report, model in zip(training.layers, models, strict=True)
        ),
        sha256=sha256,
        recorded={"sha256": recording_digest(recorded), "prompts": dict(recorded.prompts)},
        config=asdict(options),
    )


def _build(
    path: Path, tensors: dict[str, Tensor], entry: LayerEntry, manifest: PredictorManifest
) -> LayerModel:
    experts, hidden = manifest.num_experts, manifest.hidden

    def take(name: str, *shape: int) -> Tensor:
        found = tensors.get(f"{name}.{entry.layer}")
        if found is None or tuple(found.shape) != shape:
            what = "no tensor" if found is None else f"{list(found.shape)}"
            raise CheckpointError(
                f"{path}: {name}.{entry.layer} is {what}, expected {list(shape)}; train the "
                "predictor again"
            )
        if not bool(found.isfinite().all()):
            raise CheckpointError(
                f"{path}: {name}.{entry.layer} holds numbers that are not finite; train the "
                "predictor again"
            )
        return found

    rule = manifest.router_rule
    if entry.kind == "mlp":
        return Mlp(
            take("weight_in", 2 * hidden, hidden),
            take("bias_in", 2 * hidden),
            take("weight_out", experts, 2 * hidden),
            take("bias_out", experts),
            RouterRule(kind="topk_softmax", path=rule.path, top_k=rule.top_k),
        )
    has_bias = f"bias.{entry.layer}" in tensors
    return Gate(
        take("weight", experts, hidden),
        take("bias", experts) if has_bias else None,
        rule,
        take("correction", experts) if rule.correction_bias else None,
    )
