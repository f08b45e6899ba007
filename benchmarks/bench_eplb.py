"""How long DeepSeek's own EPLB (PyTorch) and ours take to decide, on the same loads.

Run ``python benchmarks/bench_eplb.py EPLB_PY [OUT.csv]``, where EPLB_PY is ``eplb.py`` of
https://github.com/deepseek-ai/EPLB. Needs torch. For every number of experts E, devices D and
layers decided in one call it takes pairs of runs, alternating which goes first, and prints the
medians in milliseconds and the median of the pairs' ratios. Loads follow a power law, two slots
per expert. Both get what they are written for: a tensor, an array. Times are CPU times of the
thread, of which both use one.
"""

import csv
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time
from types import ModuleType

import numpy as np
import torch
from provenance import provenance

from moeless.policies.planners.eplb_rebalance import rebalance_experts

SHAPES = ((16, 8), (64, 8), (256, 64))
LAYERS = (1, 58)
PAIRS = 15


def load_original(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("eplb", path)
    if spec is None or spec.loader is None:
        sys.exit(f"cannot load {path}; give eplb.py of the EPLB repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(call: Callable[[], object]) -> float:
    start = thread_time()
    call()
    return thread_time() - start


def bench(
    original: ModuleType, experts: int, devices: int, layers: int, rng: np.random.Generator
) -> dict[str, float]:
    slots = 2 * experts
    theirs_s, ours_s = [], []
    for pair in range(PAIRS + 1):
        popularity = np.arange(1, experts + 1) ** -0.7
        load_LE = np.stack(
            [
                rng.multinomial(8192, rng.permutation(popularity / popularity.sum()))
                for _ in range(layers)
            ]
        )
        weight = torch.from_numpy(load_LE)

        def theirs(weight: torch.Tensor = weight) -> object:
            return original.rebalance_experts(weight, slots, 1, 1, devices)

        def ours(load_LE: np.ndarray = load_LE) -> object:
            return rebalance_experts(load_LE, num_slots=slots, num_devices=devices)

        if pair % 2:
            their_s, our_s = timed(theirs), timed(ours)
        else:
            our_s, their_s = timed(ours), timed(theirs)
        if pair:  # the first pair warms up
            theirs_s.append(their_s)
            ours_s.append(our_s)
    ratio = median(t / o for t, o in zip(theirs_s, ours_s, strict=True))
    row: dict[str, float] = {
        "experts": experts,
        "devices": devices,
        "layers": layers,
        "original_ms": round(median(theirs_s) * 1e3, 4),
        "ours_ms": round(median(ours_s) * 1e3, 4),
        "original_over_ours": round(ratio, 1),
    }
    print(
        f"{experts:4} {devices:4} {layers:6}   {median(theirs_s) * 1e3:9.2f} ms   "
        f"{median(ours_s) * 1e3:8.3f} ms   {ratio:6.1f}x"
    )
    return row


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python benchmarks/bench_eplb.py EPLB_PY [OUT.csv]")
    original = load_original(sys.argv[1])
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print("   E    D layers       original           ours    original / ours")
    rows = [
        bench(original, experts, devices, layers, rng)
        for experts, devices in SHAPES
        for layers in LAYERS
    ]
    if len(sys.argv) == 3:
        with Path(sys.argv[2]).open("w", newline="", encoding="utf-8") as file:
            file.write(
                provenance("measured: CPU time of one thread, medians of pairs of runs") + "\n"
            )
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
