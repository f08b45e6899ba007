"""MoE block time: moeless against transformers' own grouped_mm, side by side in one run.

The same random checkpoint is loaded twice: unmodified, and without experts, with MoEless as the
experts. Both blocks get the same inputs, in turn, a few calls each, and the median of each is
compared. Ratios below 1.00 mean that moeless is faster.

Between the turns there is a pause: threads of a parallel region that is over keep spinning for
some milliseconds, and would take the cores of the workers. An engine beside workers computes with
half of the threads, as ``moeless serve`` has it.

    python benchmarks/bench_moe_layer.py                    inline (1 device) / grouped_mm
    python benchmarks/bench_moe_layer.py --mode process     2 one-thread workers / inline
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GraniteMoeSharedConfig, MixtralConfig

from moeless.bootstrap.serving.experts import ExpertsRuntime, start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.engines.transformers.loader import LoadedModel, load_engine_model

COMMON = {
    "vocab_size": 64,
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SHAPES = {
    "576/1536, 8 experts, top-2": MixtralConfig(
        **COMMON, intermediate_size=1536, num_local_experts=8, num_experts_per_tok=2
    ),
    "demo: 576/48, 16 experts, top-8": GraniteMoeSharedConfig(
        **COMMON,
        intermediate_size=48,
        shared_intermediate_size=768,
        num_local_experts=16,
        num_experts_per_tok=8,
    ),
}
TOKENS = (1, 8, 32, 128, 512, 1024, 2048)
CALLS_PER_TURN = 5
PAUSE_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two functions that are compared, and the engine's threads while it runs."""

    call: Callable[[], object]
    threads: int


def save_random(config, dtype: str, directory: Path) -> None:
    """Write a checkpoint with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)


def moe_block(model):
    """The MoE block of the second layer, and how to call it on [1, T, H]."""
    layer = model.model.layers[1]
    block = getattr(layer, "block_sparse_moe", None) or layer.mlp
    return lambda x: block(x)


def start(directory: Path, args, *, process: bool) -> tuple[LoadedModel, ExpertsRuntime]:
    """Load without experts and attach ours."""
    loaded = load_engine_model(directory)
    config = ExpertsConfig(
        devices=parse_devices("cpu:2" if process else "cpu:1"),
        invoker="process" if process else "inline",
        # On one device there is nothing to decide: all experts are on it.
        policy=PolicyConfig(policy=args.policy if process else "static"),
        worker_threads=1 if process else None,
    )
    runtime = start_experts(loaded, config)
    deadline = time.monotonic() + 60
    experts = loaded.spec.num_functions
    while runtime.client.board.warm_LED.any(axis=2).sum() < experts:
        assert time.monotonic() < deadline, "experts did not become warm"
        time.sleep(0.01)
    return loaded, runtime


def alternate(first: Side, second: Side, seconds: float) -> tuple[float, float]:
    """Median seconds of two functions that take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 3 * CALLS_PER_TURN:
        for kept, side in zip(times, (first, second), strict=True):
            torch.set_num_threads(side.threads)
            time.sleep(PAUSE_S)
            side.call()
            for _ in range(CALLS_PER_TURN):
                began = time.perf_counter()
                side.call()
                kept.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["inline", "process"], default="inline")
    parser.add_argument(
        "--policy", default=PolicyConfig().policy, help="of the two workers; what serving uses"
    )
    parser.add_argument("--threads", type=int, default=2, help="of an inline engine")
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    threads = args.threads if args.mode == "inline" else max(1, args.threads // 2)
    rows = []
    names = ("inline", "grouped_mm") if args.mode == "inline" else ("process", "inline")
    print(f"{'shape':34} {'dtype':9} {'T':>5} {names[0]:>11} {names[1]:>11} {'ratio':>6}  (ms)")
    for shape, config in SHAPES.items():
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as name, torch.inference_mode():
                directory = Path(name)
                save_random(config, dtype, directory)
                ours, runtime = start(directory, args, process=args.mode == "process")
                others: list[ExpertsRuntime] = []
                if args.mode == "inline":
                    reference = AutoModelForCausalLM.from_pretrained(
                        directory, dtype="auto", experts_implementation="grouped_mm"
                    )
                    other = moe_block(reference)
                else:
                    loaded, inline = start(directory, args, process=False)
                    others.append(inline)
                    other = moe_block(loaded.model)
                block = moe_block(ours.model)
                for tokens in args.tokens:
                    x = torch.randn(1, tokens, 576).to(getattr(torch, dtype))
                    mine, theirs = alternate(
                        Side(call=partial(block, x), threads=threads),
                        Side(call=partial(other, x), threads=args.threads),
                        args.seconds,
                    )
                    ratio = mine / theirs
                    rows.append(
                        {
                            "shape": shape,
                            "dtype": dtype,
                            "tokens": tokens,
                            f"{names[0]}_s": mine,
                            f"{names[1]}_s": theirs,
                            "ratio": ratio,
                        }
                    )
                    print(
                        f"{shape:34} {dtype:9} {tokens:5} {mine * 1e3:11.3f} {theirs * 1e3:11.3f}"
                        f" {ratio:6.2f}",
                        flush=True,
                    )
                for each in (runtime, *others):
                    each.close()
    worst = max(row["ratio"] for row in rows)
    print(f"largest ratio {worst:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"mode": args.mode, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
