"""What a directory with a trained predictor says about itself: ``manifest.json``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from moeless.core.router import RouterRule
from moeless.errors import CheckpointError, ConfigError, os_reason
from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.gate_predictor import Gate
from moeless.learned.load_predictor import Reads
from moeless.learned.shards import MANIFEST_FILE, fingerprint_gates

_FORMAT, _VERSION = "moeless-predictor", 1

_INTEGERS = ("num_layers", "num_experts", "top_k", "hidden", "distance")


@dataclass(frozen=True, kw_only=True)
class LayerEntry:
    """One predicted layer.

    Args:
        layer: MoE layer that is predicted.
        kind: ``gate`` or ``mlp``.
        trained: Whether it has another model than the copied gate.
        spread: See ``expected_shares``.
        accuracy_before: Mean load accuracy of the copied gate on held-out conversations.
        accuracy_after: The same of this model.
        penalty: The ridge penalty, if any.
        epochs: Passes that descending made.
        error: Share of misplaced tokens by batch size; None where it was not measured.
    """

    layer: int
    kind: str
    trained: bool
    spread: float
    accuracy_before: float
    accuracy_after: float
    penalty: float | None = None
    epochs: int = 0
    error: ErrorEstimate | None = None


@dataclass(frozen=True, kw_only=True)
class PredictorManifest:
    """Everything about a trained predictor but its tensors.

    Args:
        model: Id of the model it was trained for.
        family: Its family.
        num_layers: L.
        num_experts: E.
        top_k: K.
        hidden: H.
        layer_ids: The model's own index of each MoE layer.
        gates_sha256: Fingerprint of the model's gates.
        router_rule: How they choose.
        distance: d.
        method: How it was trained.
        reads: What it reads.
        tokens: How many tokens were fitted to, decided and were reported on.
        layers: The predicted layers, in order.
        sha256: Of the tensors' file.
        recorded: What it was trained on: ``sha256`` names the recording, ``prompts`` its prompts.
        config: The resolved options of the training.
    """

    model: str
    family: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    layer_ids: Sequence[int]
    gates_sha256: str
    router_rule: RouterRule
    distance: int
    method: str
    reads: Reads
    tokens: Mapping[str, int]
    layers: Sequence[LayerEntry]
    sha256: str
    recorded: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def require_gates(self, gates: Sequence[Gate], *, model: str, where: Path) -> None:
        """Require that the predictor is that of a model.

        Args:
            gates: The model's own gates.
            model: Its id, for the message.
            where: The predictor's directory, for the message.

        Raises:
            ConfigError: It was trained for another one.
        """
        experts, hidden = gates[0].weight.shape
        mine = (self.num_layers, self.num_experts, self.hidden, self.top_k)
        theirs = (len(gates), experts, hidden, gates[0].rule.top_k)
        if mine != theirs:
            raise ConfigError(
                f"predictor {where} was trained for {self.model} with {_shape(mine)}, but {model} "
                f"has {_shape(theirs)}; train one for it: moeless predictor train"
            )
        if fingerprint_gates(gates) != self.gates_sha256:
            raise ConfigError(
                f"predictor {where} was trained for other gates ({self.model}) than those of "
                f"{model}; train one for it: moeless predictor train"
            )

    def require_distance(self, distance: int, *, where: Path) -> None:
        """Require a prediction distance.

        Raises:
            ConfigError: It was trained for another one.
        """
        if distance != self.distance:
            raise ConfigError(
                f"predictor {where} looks {self.distance} layers ahead, not {distance}; use "
                f"--distance {self.distance}, or train another"
            )


def manifest_json(manifest: PredictorManifest) -> str:
    """The JSON document."""
    content = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
    return json.dumps(content, indent=1) + "\n"


def read_predictor_manifest(directory: Path) -> PredictorManifest:
    """Read and check ``manifest.json``.

    Args:
        directory: Holds the predictor.

    Raises:
        CheckpointError: It is missing, damaged, of another format or version, or incomplete.
    """
    path = Path(directory) / MANIFEST_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} has no {MANIFEST_FILE}; give a directory that moeless predictor train "
            "wrote"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {os_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON; train the predictor again") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not that of a predictor: format is not {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} has version {content.get('version')!r}; this moeless reads version {_VERSION}"
        )
    try:
        return _parse(content)
    except (TypeError, ValueError, KeyError, ConfigError) as error:
        raise CheckpointError(f"{path} is incomplete or changed: {error}") from error


def is_predictor(directory: Path) -> bool:
    """Whether a directory holds a predictor, of whatever version."""
    try:
        content = json.loads((directory / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT


def _parse(content: dict[str, Any]) -> PredictorManifest:
    names = {each.name for each in fields(PredictorManifest)}
    known = {name: value for name, value in content.items() if name in names}
    for name in _INTEGERS:
        if type(known.get(name)) is not int or known[name] < 1:
            raise ValueError(f"{name} is {known.get(name)!r}, not a positive integer")
    known["router_rule"] = RouterRule(**known["router_rule"])
    known["layers"] = tuple(_parse_layer(entry) for entry in known["layers"])
    manifest = PredictorManifest(**known)
    expected = list(range(manifest.distance, manifest.num_layers))
    if [entry.layer for entry in manifest.layers] != expected:
        raise ValueError(f"layers are not {manifest.distance} to {manifest.num_layers - 1}")
    return manifest


def _parse_layer(entry: dict[str, Any]) -> LayerEntry:
    error = entry.get("error")
    parsed = LayerEntry(**{**entry, "error": None if error is None else ErrorEstimate(**error)})
    if parsed.kind not in ("gate", "mlp"):
        raise ValueError(f"layer {parsed.layer} is of kind {parsed.kind!r}")
    if not 0.0 <= float(parsed.spread) < float("inf"):
        raise ValueError(f"layer {parsed.layer} has the spread {parsed.spread}")
    return parsed


def _shape(shape: tuple[int, int, int, int]) -> str:
    layers, experts, hidden, top_k = shape
    return f"{layers} MoE layers of {experts} experts (top-{top_k}), hidden size {hidden}"
