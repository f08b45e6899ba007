"""What no standing set of replicas can do better than: bounds for as many experts as devices.

Run ``MOELESS_DATA_DIR=... python benchmarks/hindsight_sets.py --out FILE``. Simulated, under the
paper's time model. R replicas of E experts on D devices leave at least E + D - R
groups of experts and devices that share no replica. A group of n devices has to compute its own
experts' tokens, whatever the split, so that its slowest device has at least the mean over the
group. The least of the greatest such mean over all ways to form E + D - R groups is therefore
below the time of every set of R replicas (a set with more groups is only tied down further).

Four bounds of the straggler ratio, over the layer-steps by which ``replay_results`` judges:
``in_hindsight`` is of the one best grouping for all of a layer's steps, ``following`` of the
grouping that would have been best so far (exponentially weighted, 1/10 for the newest step),
changed at every step for nothing, ``previous`` of the one that was best for the step before, and
``knowing`` of the best grouping for each step alone.
"""

import argparse
import csv
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from balance_targets import FEWEST_PER_DEVICE, balance_target
from demo_traces import demo_trace
from numpy.typing import NDArray
from provenance import provenance

from moeless.workloads.arrivals import read_arrivals
from moeless.workloads.compose import compose_prefill
from moeless.workloads.routing_trace import read_trace

DEVICES = 8
FACTOR = 1.5
NEWEST = 0.1
BLOCK = 4096
COLUMNS = (
    *("trace", "factor", "steps", "layer_steps", "target"),
    *("in_hindsight", "following", "previous", "knowing"),
)


def partitions(items: int, groups: int) -> Iterator[list[int]]:
    """The group of each item, for every way to form so many groups that are not empty."""

    def extend(chosen: list[int], used: int) -> Iterator[list[int]]:
        missing = items - len(chosen)
        if groups - used > missing:
            return
        if missing == 0:
            yield chosen
            return
        for group in range(min(used + 1, groups)):
            yield from extend([*chosen, group], max(used, group + 1))

    yield from extend([], 0)


def groupings(experts: int, devices: int, replicas: int) -> tuple[NDArray, NDArray]:
    """All ways to tie experts and devices together.

    Returns:
        Members, 0 or 1 [C, G, E], and devices of each group [C, G].
    """
    groups = experts + devices - replicas
    shares = [
        sizes
        for sizes in itertools.product(range(1, devices + 1), repeat=groups)
        if sum(sizes) == devices
    ]
    members, sizes_of = [], []
    for group_E in partitions(experts, groups):
        member_GE = np.arange(groups)[:, None] == np.array(group_E)[None, :]
        for sizes in shares:
            members.append(member_GE)
            sizes_of.append(sizes)
    return np.array(members, dtype=np.float32), np.array(sizes_of, dtype=np.float32)


def bounds_of(load_SE: NDArray, ways: tuple[NDArray, NDArray], skipped: int) -> NDArray:
    """The four bounds, summed over the steps from ``skipped`` on; see the module."""
    member_CGE, size_CG = ways
    ideal_S = np.ceil(load_SE.sum(axis=1) / DEVICES)
    ratio_SC = np.empty((len(load_SE), len(size_CG)), dtype=np.float32)
    for start in range(0, len(size_CG), BLOCK):
        part = slice(start, start + BLOCK)
        load_SCG = np.einsum("se,cge->scg", load_SE.astype(np.float32), member_CGE[part])
        ratio_SC[:, part] = np.ceil(load_SCG / size_CG[part]).max(axis=2) / ideal_S[:, None]
    followed, previous = [], []
    weighted_C = ratio_SC[0].copy()
    for step in range(1, len(ratio_SC)):
        if step >= skipped:
            followed.append(ratio_SC[step, weighted_C.argmin()])
            previous.append(ratio_SC[step, ratio_SC[step - 1].argmin()])
        weighted_C += NEWEST * (ratio_SC[step] - weighted_C)
    judged_SC = ratio_SC[max(skipped, 1) :]
    hindsight_S = judged_SC[:, judged_SC.mean(axis=0).argmin()]
    return np.array(
        [np.sum(hindsight_S), np.sum(followed), np.sum(previous), judged_SC.min(1).sum()]
    )


def row_of(name: str, load_SLE: NDArray, most_steps: int) -> dict[str, object]:
    """One row: the bounds of a trace, over at most so many consecutive judged steps a layer."""
    experts = load_SLE.shape[2]
    ways = groupings(experts, DEVICES, round(FACTOR * experts))
    first = len(load_SLE) // 10
    sums, count, steps = np.zeros(4), 0, 0
    for layer in range(load_SLE.shape[1]):
        total_S = load_SLE[:, layer].sum(axis=1)
        judged_S = np.flatnonzero(total_S >= FEWEST_PER_DEVICE * DEVICES)
        skipped = int((judged_S < first).sum())
        # History from before the first judged step, where there is some.
        start = max(0, skipped - round(3 / NEWEST))
        judged_S = judged_S[start : skipped + most_steps]
        sums += bounds_of(load_SLE[judged_S, layer], ways, skipped - start)
        judged = len(judged_S) - max(skipped - start, 1)
        count, steps = count + judged, max(steps, judged)
    means = (sums / count).round(4).tolist()
    target = balance_target(experts, DEVICES, FACTOR, FEWEST_PER_DEVICE)
    return {
        "trace": name,
        "factor": FACTOR,
        "steps": steps,
        "layer_steps": count,
        "target": "" if target is None else target.mean,
        **dict(zip(COLUMNS[-4:], means, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = os.environ.get("MOELESS_DATA_DIR")
    parser.add_argument("--data", type=Path, default=data and Path(data), required=data is None)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--steps", type=int, default=200, help="judged steps of each layer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    requests = read_trace(options.data / "routing/mixtral-8x7b_mmlu_requests.npz")
    traces = {"demo8": read_trace(demo_trace(8, options.traces))}
    for name in ("conv", "code"):
        arrivals = read_arrivals(options.data / f"arrivals/AzureLLMInferenceTrace_{name}.csv")
        traces[name] = compose_prefill(requests, arrivals, seed=0)
    rows = []
    for name, trace in traces.items():
        rows.append(row_of(name, trace.loads_NLE.astype(np.int64), options.steps))
        print(rows[-1], flush=True)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        file.write(provenance("simulated") + "\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
