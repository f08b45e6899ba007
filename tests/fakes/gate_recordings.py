"""Small recordings of gate inputs in which one layer's states are a linear map of another's."""

from pathlib import Path

import torch

from moeless.core.router import RouterRule
from moeless.learned.gate_predictor import Gate
from moeless.learned.scoring import choose
from moeless.learned.shards import Shard, ShardManifest, ShardWriter, fingerprint_gates

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 12
RULE = RouterRule(kind="topk_softmax", path="mlp.router", top_k=TOP_K)

RULES = {
    "softmax_topk": RouterRule(kind="softmax_topk", path="gate", top_k=TOP_K),
    "topk_softmax": RULE,
    "sparsemixer": RouterRule(kind="sparsemixer", path="gate", top_k=TOP_K, jitter_eps=0.01),
    "topk_sigmoid": RouterRule(kind="topk_sigmoid", path="gate", top_k=TOP_K),
    "sigmoid_group": RouterRule(
        kind="sigmoid_group",
        path="gate",
        top_k=TOP_K,
        correction_bias="correction",
        num_groups=4,
        top_groups=2,
    ),
}


def draw_gates(rule=RULE, *, layers=LAYERS, seed=0):
    """One random gate per layer, with a correction where the rule has one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Gate(
            torch.randn(EXPERTS, HIDDEN, generator=generator),
            None,
            rule,
            0.1 * torch.randn(EXPERTS, generator=generator) if rule.correction_bias else None,
        )
        for _ in range(layers)
    ]


def draw_states(tokens, *, layers=LAYERS, noise=0.0, still=(), topic=0.0, seed=0):
    """States of tokens, layer by layer a rotation of the ones before, plus noise [T, L, H].

    Layers in ``still`` are not rotated: what enters their gates is what entered the ones before.
    A ``topic`` is what all tokens have in common: it makes some experts much busier than others.
    """
    generator = torch.Generator().manual_seed(1000)
    turns = [
        torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
        for _ in range(layers - 1)
    ]
    generator = torch.Generator().manual_seed(seed)
    common = topic * torch.randn(HIDDEN, generator=generator)
    states = [common + torch.randn(tokens, HIDDEN, generator=generator)]
    for layer, turn in enumerate(turns, start=1):
        ahead = states[-1] if layer in still else states[-1] @ turn
        states.append(ahead + noise * torch.randn(tokens, HIDDEN, generator=generator))
    return torch.stack(states, dim=1)


def record_tokens(
    directory,
    *,
    rule=RULE,
    gates=None,
    conversations=20,
    tokens=150,
    decoded=50,
    noise=0.0,
    still=(),
    layer_inputs=False,
    model="tiny",
    dtype="float32",
    bytes_per_shard=2**18,
):
    """Write a recording; returns its directory."""
    gates = gates or draw_gates(rule)
    manifest = ShardManifest(
        model=model,
        family="gpt_oss",
        num_layers=len(gates),
        num_experts=EXPERTS,
        top_k=rule.top_k,
        hidden=HIDDEN,
        layer_ids=tuple(range(len(gates))),
        dtype=dtype,
        gates_sha256=fingerprint_gates(gates),
        router_rule=rule,
        prompts={"source": "made up", "limit": None, "seed": 0},
        config={"layer_inputs": layer_inputs},
    )
    writer = ShardWriter(directory, manifest, gates, max_bytes_per_shard=bytes_per_shard)
    for number in range(conversations):
        states = draw_states(
            tokens, layers=len(gates), noise=noise, still=still, topic=2.0, seed=number
        )
        states = states.to(getattr(torch, dtype))
        ids = [
            choose(gate.logits(states[:, layer]), rule, gate.correction).sort(dim=-1).values
            for layer, gate in enumerate(gates)
        ]
        writer.add(
            Shard(
                gate_input=states,
                topk_ids=torch.stack(ids, dim=1).short(),
                conversation=torch.full((tokens,), number, dtype=torch.int32),
                position=torch.arange(tokens, dtype=torch.int32),
                decode=(torch.arange(tokens) >= tokens - decoded).to(torch.uint8),
                token_ids=torch.arange(tokens, dtype=torch.int32),
                layer_input=2.0 * states if layer_inputs else None,
            )
        )
    writer.close(complete=True)
    return Path(directory)
