"""The engine holds no expert, and workers hold what their budget allows and no more."""

import json
import os
import shutil
import socket
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

from effort import PATIENCE_S
from moeless.functions.links.messages import receive
from moeless.functions.links.pulse import create_region

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 8, 1024, 5632
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2
SLOTS = 6

pytestmark = pytest.mark.slow

ENGINE = """
import json, sys
from pathlib import Path
import psutil, torch
from moeless.bootstrap.serving.experts import start_experts
from moeless.config import ExpertsConfig
from moeless.core.cluster import parse_devices
from moeless.engines.transformers.loader import load_engine_model

loaded = load_engine_model(Path(sys.argv[1]))
runtime = start_experts(
    loaded,
    ExpertsConfig(devices=parse_devices("cpu:2"), device_memory_bytes=int(sys.argv[2])),
)
workers = [psutil.Process(pid) for pid in runtime.client.report()["worker_pids"]]
peaks = [0, 0]

def note(*_):
    for device, worker in enumerate(workers):
        peaks[device] = max(peaks[device], worker.memory_info().rss)
    return False

ids = torch.randint(3, 300, (1, 64), generator=torch.Generator().manual_seed(0))
loaded.model.generate(
    ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, stopping_criteria=[note]
)
note()
report = runtime.client.report()
parameters = sum(p.nbytes for p in loaded.model.parameters())
print(json.dumps({
    "engine_rss": psutil.Process().memory_info().rss,
    "parameters": parameters,
    "worker_peaks": peaks,
    "restarts": report["worker_restarts"],
    "held_peaks": report["worker_peak_bytes"],
    "loads": sum(report["cold_starts_L"]),
}))
runtime.close()
"""


@pytest.fixture
def large_checkpoint(tmp_path):
    """Random weights, more than 1 GB of them in experts, one shard per layer."""
    needed = 2 * LAYERS * EXPERTS * EXPERT_BYTES
    if shutil.disk_usage(tmp_path).free < needed:
        pytest.skip(f"needs {needed / 1e9:.1f} GB of disk for a checkpoint")
    if psutil.virtual_memory().available < 2 * needed:
        pytest.skip(f"needs {2 * needed / 1e9:.1f} GB of memory")
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        dtype=torch.bfloat16,
        architectures=["MixtralForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (torch.randn(shape, generator=generator) / HIDDEN**0.5).bfloat16()

    first = {
        "model.embed_tokens.weight": draw(320, HIDDEN),
        "lm_head.weight": draw(320, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    shards = [first]
    inner, outer = draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shard = {
            f"{prefix}self_attn.q_proj.weight": draw(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": draw(HIDDEN // 4, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": draw(HIDDEN // 4, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
            f"{prefix}block_sparse_moe.gate.weight": draw(EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            name = f"{prefix}block_sparse_moe.experts.{expert}."
            shard |= {
                f"{name}w1.weight": inner.clone(),
                f"{name}w3.weight": inner.clone(),
                f"{name}w2.weight": outer.clone(),
            }
        shards.append(shard)
    names = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, tmp_path / file, metadata={"format": "pt"})
        names |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    yield tmp_path
    for file in set(names.values()):
        (tmp_path / file).unlink()


def idle_worker_rss():
    """Memory of a worker that holds nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pulse = create_region()
    with ours:
        command = [sys.executable, "-m", "moeless.functions.worker", "--device", "cpu"]
        command += [
            "--threads",
            "1",
            "--socket-fd",
            str(theirs.fileno()),
            "--pulse-fd",
            str(pulse),
        ]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno(), pulse])
        theirs.close()
        os.close(pulse)
        message, _ = receive(ours)
        assert message["op"] == "ready"
        rss = psutil.Process(worker.pid).memory_info().rss
    worker.wait(timeout=PATIENCE_S)
    return rss


def test_the_engine_holds_no_expert_and_workers_keep_their_budget(large_checkpoint):
    assert LAYERS * EXPERTS * EXPERT_BYTES > 1e9
    budget = SLOTS * (EXPERT_BYTES + (1 << 20))
    result = subprocess.run(
        [sys.executable, "-c", ENGINE, str(large_checkpoint), str(budget)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["restarts"] == [0, 0]
    assert found["loads"] > 2 * SLOTS
    # Shared payload pages count here, too: they are the engine's rows, not weights.
    assert found["engine_rss"] < 0.7e9 + found["parameters"]
    base = idle_worker_rss()
    # While it loads, a worker holds the expert as read beside the one it lays out.
    loading = 3 * EXPERT_BYTES
    for held, rss in zip(found["held_peaks"], found["worker_peaks"], strict=True):
        assert EXPERT_BYTES < held <= budget
        assert rss < base + budget + loading + 0.05e9
