"""Copies of a model's gates beside its recorded gate inputs: ``gates.safetensors``."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.errors import TraceError
from moeless.learned.gate_predictor import Gate
from moeless.learned.shards.files import written_durably
from moeless.learned.shards.manifest import GATES_FILE, ShardManifest


def fingerprint_gates(gates: Sequence[Gate]) -> str:
    """Digest of the gates' numbers in float32: equal for equal gates, whatever their dtype.

    Args:
        gates: One per MoE layer.

    Returns:
        SHA-256 in hexadecimal.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_name_tensors(gates).items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def write_gates(directory: Path, gates: Sequence[Gate]) -> None:
    """Write ``gates.safetensors``, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    with written_durably(directory / GATES_FILE) as path:
        save_file(_name_tensors(gates), path)


def read_gates(directory: Path, manifest: ShardManifest) -> list[Gate]:
    """Read the gates of a recording, in float32.

    Args:
        directory: Holds the recording.
        manifest: Its manifest.

    Raises:
        TraceError: They are missing, damaged, of another shape, or other gates than those that
            the manifest was written for.
    """
    path = Path(directory) / GATES_FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise TraceError(f"{directory} has no {GATES_FILE}; record again") from error
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path} is damaged ({error}); record again") from error
    gates = [_read_gate(path, tensors, layer, manifest) for layer in range(manifest.num_layers)]
    if fingerprint_gates(gates) != manifest.gates_sha256:
        raise TraceError(f"{path} holds other gates than its manifest was written for")
    return gates


def _read_gate(
    path: Path, tensors: dict[str, Tensor], layer: int, manifest: ShardManifest
) -> Gate:
    rule: RouterRule = manifest.router_rule
    experts, hidden = manifest.num_experts, manifest.hidden

    def read(kind: str, shape: tuple[int, ...], *, needed: bool) -> Tensor | None:
        tensor = tensors.get(f"{kind}.{layer}")
        if tensor is None:
            if needed:
                raise TraceError(f"{path} has no {kind}.{layer}; record again")
            return None
        if tuple(tensor.shape) != shape:
            raise TraceError(
                f"{path}: {kind}.{layer} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor.float()

    weight = read("weight", (experts, hidden), needed=True)
    assert weight is not None
    return Gate(
        weight=weight,
        bias=read("bias", (experts,), needed=rule.has_bias),
        rule=rule,
        correction=read("correction", (experts,), needed=rule.correction_bias is not None),
    )


def _name_tensors(gates: Sequence[Gate]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for layer, gate in enumerate(gates):
        parts = {"weight": gate.weight, "bias": gate.bias, "correction": gate.correction}
        for kind, tensor in parts.items():
            if tensor is not None:
                named[f"{kind}.{layer}"] = (
                    tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
                )
    return named
