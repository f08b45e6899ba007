"""Checkpoints of tiny models, what is in them, and a plain runtime over a store."""

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from moeless.core.model import ExpertShape
from moeless.engines.transformers.families import FAMILIES as KNOWN
from moeless.engines.transformers.loader import attach_runtime, read_config
from moeless.functions.store import CheckpointIndex, ExpertStore, ExpertWeights


def save(model, directory: Path, *, original: bool = True, shard: str = "50GB") -> Path:
    model.save_pretrained(directory, save_original_format=original, max_shard_size=shard)
    return directory


def rewrite(directory: Path, change) -> Path:
    """Replace a single-file checkpoint's tensors by ``change(tensors)``."""
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return directory


def edit_config(directory: Path, **fields) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(fields)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory


def write_header(path: Path, entries: dict, data_bytes: int) -> None:
    """A safetensors file whose data is a hole: it takes no space and reads as zeros."""
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data_bytes)


def expected_expert(experts, family: str, expert: int) -> dict[str, torch.Tensor]:
    """One expert's parameters in canonical form, from the model's own experts module."""
    gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
    if family in {"gpt_oss", "llama4"}:
        gate_up, down = gate_up.t(), down.t()
    if family == "gpt_oss":
        bias = experts.gate_up_proj_bias[expert]
        return {
            "gate": gate_up[0::2],
            "up": gate_up[1::2],
            "down": down,
            "gate_bias": bias[0::2],
            "up_bias": bias[1::2],
            "down_bias": experts.down_proj_bias[expert],
        }
    gate, up = gate_up.chunk(2)
    return {"gate": gate, "up": up, "down": down}


class ReferenceRuntime:
    """Computes experts one by one with weights from a store, and notes what reaches it."""

    def __init__(self, store: ExpertStore) -> None:
        self.store = store
        self.calls: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer, hidden, index, weights):
        self.calls.append((layer, hidden, index, weights))
        shape = self.store.spec.expert
        output = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in index.unique().tolist():
            tokens, place = torch.where(index == expert)
            score = weights[tokens, place, None]
            rows = hidden[tokens]
            if shape.score_on == "input":
                rows = rows * score
            result = run_expert(self.store.load(layer, expert), shape, rows)
            if shape.score_on == "output":
                result = result * score
            output.index_add_(0, tokens, result.float())
        return output.to(hidden.dtype)


def run_expert(weights: ExpertWeights, shape: ExpertShape, rows: torch.Tensor) -> torch.Tensor:
    gate = functional.linear(rows, weights.gate, weights.gate_bias)
    up = functional.linear(rows, weights.up, weights.up_bias)
    if shape.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
        inner = (up + 1) * gate * torch.sigmoid(gate * shape.alpha)
    else:
        inner = functional.silu(gate) * up
    return functional.linear(inner, weights.down, weights.down_bias)


def open_store(directory) -> ExpertStore:
    family, config = read_config(directory)
    index = CheckpointIndex(directory)
    store = ExpertStore(directory, family.layout(config, index), family.spec(config, "tiny"))
    store.validate()
    return store


def assert_equal_to_model(store, model, family) -> None:
    layers = model.get_submodule("model.layers")
    block = next(f.block for f in KNOWN if f.name == family)
    for layer, layer_id in enumerate(store.spec.layer_ids):
        experts = getattr(layers[layer_id], block).experts
        for expert in range(store.spec.num_experts):
            loaded = store.load(layer, expert)
            expected = expected_expert(experts, family, expert)
            for name, tensor in expected.items():
                assert torch.equal(getattr(loaded, name), tensor), (layer, expert, name)
            assert len(loaded.tensors()) == len(expected)
            assert loaded.num_bytes == store.bytes_of_function
            for tensor in loaded.tensors():
                assert tensor.is_contiguous()
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
                assert tensor.dtype == getattr(torch, store.spec.expert.dtype)


def assert_serves_like(loaded, model, *, atol=1e-5):
    """The same tokens, and logits within ``atol`` of the largest: sums are in another order."""
    store = ExpertStore(loaded.directory, loaded.layout, loaded.spec)
    runtime = ReferenceRuntime(store)
    attach_runtime(loaded, runtime)
    prompt = torch.randint(3, model.config.vocab_size, (2, 21), generator=torch.manual_seed(7))
    with torch.no_grad():
        expected = model(prompt).logits
        limit = atol * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(loaded.model(prompt).logits, expected, atol=limit, rtol=0)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)
    tokens = loaded.model.generate(prompt, **options)
    assert torch.equal(tokens, model.generate(prompt, **options))
    return runtime
