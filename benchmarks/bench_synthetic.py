"""How near moeless comes to the best that is possible, on synthetic loads of seven shapes.

Run ``python benchmarks/bench_synthetic.py [--csv OUT]``. Every family of
``moeless.workloads.synthetic`` is replayed (paper's time model, 8 devices, 8 and 32 experts,
memory factors 1.25, 1.5 and 2.0) as ``moeless replay`` does it. Two yardsticks:

- The split against the linear program over the same warm replicas, in tokens of the fullest
  device: ``over LP``, the worst of the sampled layer-steps.
- The straggler ratio (max device tokens over the ideal, mean) against the best FIXED set of as
  many replicas in hindsight, chosen for each layer with all measured steps known: ``ratio``.
  Below 1, following the loads was better than any set that was found. That set comes from a local
  search over all those steps, from random sets, from the topology that moeless begins with and
  from the sets that it held. It is a search, not a proof: a better set may exist.

static, eplb and swift stand beside it (eplb and swift round their slots up to a multiple of the
devices).
"""

import argparse
import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from provenance import provenance

from moeless.bootstrap.policies import PolicyOptions, max_replicas
from moeless.bootstrap.replays.replay import ReplayTask, prepare_replay
from moeless.bootstrap.replays.replay_runner import metrics_config, run_replay
from moeless.core.layer_cost import LayerCost
from moeless.policies.kernels.replica_search import best_change
from moeless.policies.kernels.set_judge import TAIL_WEIGHT, set_penalty
from moeless.policies.planners.topology import first_topology, random_topology
from moeless.simulator.metrics import measure_policy
from moeless.simulator.optimum import least_tokens
from moeless.simulator.recording import Recording, num_warm_up_steps
from moeless.workloads.routing_trace import RoutingTrace, write_trace
from moeless.workloads.synthetic import FAMILIES, make_synthetic

DEVICES = 8
EXPERTS = (8, 32)
FACTORS = (1.25, 1.5, 2.0)
LAYERS = 2
TOP_K = 2
TOKENS = 512
POLICIES = ("static", "eplb", "swift", "moeless")
TOKENS_ONLY_XD = LayerCost(token_s=1.0).price_XD(DEVICES)
BREADTH = (48, 24, 96)
"""Links, drops and exchanges that the search tries: far more than the planner does."""


def best_fixed_straggler(
    load_NE: np.ndarray, held: int, known_sets: list[np.ndarray], *, restarts: int, seed: int
) -> float:
    """Mean straggler ratio of the best fixed set that a search finds.

    Args:
        load_NE: Loads with tokens, int64 [N, E].
        held: Replicas in all.
        known_sets: Sets that the search must at least match, uint8 [E, D].
        restarts: Random sets to begin from.
        seed: Of those.
    """
    experts = load_NE.shape[1]
    capacity = [experts] * DEVICES
    rng = np.random.default_rng(seed)
    weight_N = np.full(len(load_NE), 1.0 / len(load_NE))

    def excess(replicas_ED: np.ndarray, tail: float = 0.0) -> float:
        return float(set_penalty(load_NE, weight_N, replicas_ED, TOKENS_ONLY_XD, tail, np.inf))

    # Of the sets that were held the best one is improved, too.
    known_sets = sorted(known_sets, key=lambda known: excess(known, TAIL_WEIGHT))
    starts = [
        *(known.copy() for known in known_sets[:1]),
        first_topology(experts, capacity, held),
        *(random_topology(experts, capacity, held, rng) for _ in range(restarts)),
    ]
    best = min((excess(known) for known in known_sets), default=np.inf)
    for replicas_ED in starts:
        improve(load_NE, weight_N, replicas_ED, held)
        best = min(best, excess(replicas_ED))
        if best <= 0.0:
            break
    return 1.0 + best


def improve(load_NE: np.ndarray, weight_N: np.ndarray, replicas_ED: np.ndarray, held: int) -> None:
    """Change a set in place while a change helps."""
    capacity_D = np.full(DEVICES, load_NE.shape[1], dtype=np.int64)
    change = np.empty((2, 4), dtype=np.int64)
    # A few steps lead to the neighbourhood, all of them decide.
    for stride in (8, 1):
        sample_NE = np.ascontiguousarray(load_NE[::stride])
        sample_N = weight_N[::stride] / weight_N[::stride].sum()
        for _ in range(200):
            gain = best_change(
                sample_NE,
                sample_N,
                replicas_ED,
                TOKENS_ONLY_XD,
                0.0,
                capacity_D,
                held,
                *BREADTH,
                change,
            )
            if gain <= 1e-9:
                break
            rows = [row for row in change.tolist() if row[2] >= 0]
            for expert, device, _, _ in rows:
                if expert >= 0:
                    replicas_ED[expert, device] = 0
            for _, _, expert, device in rows:
                replicas_ED[expert, device] = 1


def tokens_over_optimum(recording: Recording, trace: RoutingTrace) -> int:
    """By how many tokens the fullest device exceeds the linear program, at worst."""
    worst = 0
    for (step, layer), sample_ED in zip(
        recording.sample_N2.tolist(), recording.sample_NED, strict=True
    ):
        least = least_tokens(trace.loads_NLE[step, layer].astype(np.int64), sample_ED)
        worst = max(worst, int(recording.device_tokens_SLD[step, layer].max()) - least)
    return worst


def measure(
    family: str, experts: int, factor: float, *, options: argparse.Namespace
) -> dict[str, object]:
    """One row of the table."""
    trace = make_synthetic(
        family,
        num_layers=LAYERS,
        num_experts=experts,
        top_k=TOP_K,
        steps=options.steps,
        tokens=TOKENS,
        seed=options.seed,
    )
    policy_options = PolicyOptions(memory_factor=factor)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{family}.npz"
        write_trace(trace, path)
        prepared = prepare_replay(
            ReplayTask(
                routing=path,
                policies=POLICIES,
                devices=DEVICES,
                expert_shape="4096x14336",
                seed=options.seed,
                options=policy_options,
                keep_replicas=True,
                optimum=options.samples,
            )
        )
        recordings = run_replay(prepared, jobs=options.jobs)
    figures = {
        name: measure_policy(recording, trace.loads_NLE, config=metrics_config(prepared, name))
        for name, recording in recordings.items()
    }
    held = max_replicas("moeless", policy_options, num_experts=experts, num_devices=DEVICES)
    assert held is not None
    moeless = recordings["moeless"]
    assert moeless.replicas_SLED is not None
    first = num_warm_up_steps(len(trace))
    total, weights = 0.0, 0
    for layer in range(LAYERS):
        load_NE = trace.loads_NLE[first:, layer].astype(np.int64)
        busy_N = load_NE.any(axis=1)
        sets = np.unique(moeless.replicas_SLED[first:, layer], axis=0)
        best = best_fixed_straggler(
            np.ascontiguousarray(load_NE[busy_N]),
            held,
            [np.ascontiguousarray(s) for s in sets if s.any(axis=1).all() and s.sum() <= held],
            restarts=options.restarts,
            seed=options.seed,
        )
        total += best * int(busy_N.sum())
        weights += int(busy_N.sum())
    fixed = total / weights
    straggler = {name: row["straggler_ratio"]["mean"] for name, row in figures.items()}
    return {
        "family": family,
        "experts": experts,
        "devices": DEVICES,
        "memory_factor": factor,
        "replicas": held,
        "samples": len(moeless.sample_N2),
        "tokens_over_lp": tokens_over_optimum(moeless, trace),
        "moeless": round(straggler["moeless"], 4),
        "best_fixed": round(fixed, 4),
        "ratio": round(straggler["moeless"] / fixed, 4),
        "static": round(straggler["static"], 4),
        "eplb": round(straggler["eplb"], 4),
        "swift": round(straggler["swift"], 4),
        "moeless_memory": round(figures["moeless"]["memory_factor"], 3),
        "eplb_memory": round(figures["eplb"]["memory_factor"], 3),
        "swift_memory": round(figures["swift"]["memory_factor"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, metavar="OUT", help="write the table")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=100, help="layer-steps held against the LP")
    parser.add_argument("--restarts", type=int, default=6, help="random sets of the search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="policies replayed at a time")
    options = parser.parse_args()
    families = options.families.split(",")
    if unknown := [name for name in families if name not in FAMILIES]:
        sys.exit(f"unknown family {unknown[0]!r}; known are: {', '.join(FAMILIES)}")
    print(
        "mean straggler ratio; best fixed: a search's best set in hindsight, as many replicas\n"
        f"{'family':16}{'E':>4}{'F':>6}{'over LP':>9}{'moeless':>9}{'best fixed':>12}{'ratio':>8}"
        f"{'static':>8}{'eplb':>8}{'swift':>8}"
    )
    rows = []
    for experts in EXPERTS:
        for factor in FACTORS:
            for family in families:
                row = measure(family, experts, factor, options=options)
                rows.append(row)
                print(
                    f"{family:16}{experts:4}{factor:6}{row['tokens_over_lp']:9}"
                    f"{row['moeless']:9.4f}{row['best_fixed']:12.4f}{row['ratio']:8.4f}"
                    f"{row['static']:8.3f}{row['eplb']:8.3f}{row['swift']:8.3f}",
                    flush=True,
                )
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            file.write(
                provenance("simulated; best_fixed is the best of a search, not proven") + "\n"
            )
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
