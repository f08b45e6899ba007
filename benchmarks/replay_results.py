"""The README's balance table, and every trace, time model and memory behind it.

Run ``MOELESS_DATA_DIR=... python benchmarks/replay_results.py --out results/replay``. It looks for
``routing/mixtral-8x7b_mmlu_requests.npz`` and ``arrivals/AzureLLMInferenceTrace_{conv,code}.csv``
in that folder, and makes the traces of the demo models where ``--traces`` does not hold them
(``demo_traces``). Every run is one ``moeless replay`` command, which is printed; all figures are
simulated. With ``--work DIR`` reports are kept and not made again. Writes
``replay_targets.csv``, a row for each policy of each run, with the target where there is one
(``balance_targets``), and ``replay_table.md``, the README's table.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from balance_targets import balance_target, judge_balance, judge_layer_time
from demo_traces import demo_trace
from provenance import provenance

DEVICES = 8
ALL = "static,eplb,swift,paper,moeless,oracle"
COMPARED = "static,eplb,swift,paper,moeless"
FORESEEING = "paper,moeless"
DECODE_STEPS = 1200
COLUMNS = (
    *("trace", "steps", "cost_model", "prediction", "factor", "policy"),
    *("ratio_mean", "ratio_p99", "layer_ms_mean", "layer_ms_p99", "bound_mean", "bound_p99"),
    *("memory", "loads_per_layer_step", "blocking_per_layer_step", "search_p50_ms"),
    *("target", "met", "judged_mean", "judged_within", "judged_share"),
)


@dataclass(frozen=True)
class Run:
    """One replay."""

    trace: str
    cost_model: str
    factor: float
    policies: str = COMPARED
    prediction: str = "noisy:0.12"
    max_steps: int | None = None


def runs() -> list[Run]:
    """All of them, those of the README first."""
    found = []
    for cost_model in ("paper", "h200"):
        found += [
            Run("conv", cost_model, 2.0, ALL),
            Run("conv", cost_model, 1.5, "eplb,swift,paper,moeless"),
        ]
    for trace, factors in (
        ("code", (2.0, 1.5)),
        ("demo8", (2.0, 1.5)),
        ("demo16", (2.0, 1.5)),
        ("demo32", (2.0, 1.5, 1.25)),
    ):
        found += [Run(trace, "paper", factor) for factor in factors]
        found += [Run(trace, "h200", factor) for factor in factors]
    for trace, factors in (
        ("conv", (2.0, 1.5)),
        ("code", (2.0, 1.5)),
        ("demo8", (2.0, 1.5)),
        ("demo16", (2.0,)),
        ("demo32", (2.0, 1.5, 1.25)),
    ):
        found += [Run(trace, "paper", factor, FORESEEING, "previous") for factor in factors]
    for trace in ("conv-decode", "code-decode"):
        for cost_model in ("h200", "a6000"):
            found += [Run(trace, cost_model, 2.0, max_steps=DECODE_STEPS)]
    for trace, factors in (
        ("conv", (2.0, 1.5)),
        ("code", (2.0, 1.5)),
        ("demo8", (2.0,)),
        ("demo16", (2.0,)),
        ("demo32", (2.0, 1.5)),
    ):
        found += [Run(trace, "a6000", factor) for factor in factors]
    return found


def source(trace: str, options: argparse.Namespace) -> list[str]:
    """The options of ``moeless replay`` that name a trace."""
    if trace.startswith("demo"):
        return ["--routing", str(demo_trace(int(trace.removeprefix("demo")), options.traces))]
    name, _, compose = trace.partition("-")
    arrivals = options.data / f"arrivals/AzureLLMInferenceTrace_{name}.csv"
    chosen = ["--routing", str(options.routing), "--arrivals", str(arrivals)]
    return [*chosen, "--compose", compose] if compose else chosen


def replay(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Run one; its report, and under ``judged`` what its dump says of the target."""
    command = ["replay", *source(run.trace, options), "--devices", str(DEVICES)]
    command += ["--cost-model", run.cost_model, "--memory-factor", str(run.factor)]
    command += ["--policies", run.policies, "--prediction", run.prediction, "--seed", "0"]
    if run.max_steps is not None:
        command += ["--max-steps", str(run.max_steps)]
    kept = None
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(" ".join(command).encode()).hexdigest()[:16]
        kept = options.work / f"{digest}.json"
        if kept.exists():
            return json.loads(kept.read_text(encoding="utf-8"))
    print("$ moeless", *command, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out, dump = Path(folder) / "out.json", Path(folder) / "dump.npz"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "moeless", *command, "--no-progress"),
                *("--jobs", str(options.jobs), "--json", str(out), "--dump", str(dump)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            sys.exit(done.stderr.strip() or f"moeless replay ended with {done.returncode}")
        report = json.loads(out.read_text(encoding="utf-8"))
        report["judged"] = judge(run, report, dump)
    if kept is not None:
        kept.write_text(json.dumps(report), encoding="utf-8")
    return report


def judge(run: Run, report: dict[str, Any], dump: Path) -> dict[str, Any]:
    """What the target says of ``moeless``, or nothing."""
    experts = report["trace"]["experts"]
    if run.cost_model != "paper":
        return judge_layer_time(experts, DEVICES, report["policies"])
    with np.load(dump) as arrays:
        device_tokens_SLD = arrays["moeless/device_tokens"]
    per_device = float(np.median(device_tokens_SLD.sum(axis=2))) / DEVICES
    target = balance_target(experts, DEVICES, run.factor, per_device)
    if target is None:
        return {}
    cold = report["policies"]["moeless"]["cold_starts_per_layer_step"]
    return judge_balance(target, device_tokens_SLD, cold)


def rows(run: Run, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the CSV, one per policy."""
    found = []
    for policy, figures in report["policies"].items():
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row |= {
            "trace": run.trace,
            "steps": report["trace"]["steps"],
            "cost_model": run.cost_model,
            "prediction": run.prediction,
            "factor": "" if policy in ("static", "oracle") else run.factor,
            "policy": policy,
            "memory": round(figures["memory_factor"], 4),
            "loads_per_layer_step": round(figures["cold_starts_per_layer_step"], 5),
            "blocking_per_layer_step": round(figures["blocking_loads_per_layer_step"], 5),
        }
        for column, key in (
            ("ratio", "straggler_ratio"),
            ("layer_ms", "layer_forward_ms"),
            ("bound", "bound_ratio"),
        ):
            for point in ("mean", "p99"):
                row[f"{column}_{point}"] = f"{figures[key][point]:.5g}"
        if policy == "moeless":
            row["search_p50_ms"] = f"{figures['search']['p50_us'] / 1e3:.3g}"
            row |= report["judged"]
        found.append(row)
    return found


def markdown(found: list[dict[str, Any]]) -> str:
    """The README's table: balance, and layer time under the H200 model."""
    wanted = [("static", ""), ("eplb", 2.0), ("swift", 2.0), ("paper", 2.0), ("moeless", 2.0)]
    wanted.append(("moeless", 1.5))
    lines = [
        "| policy | straggler ratio, mean (p99) | layer time on H200s ÷ lower bound, mean (p99) "
        "| memory ÷ experts | loads per layer-step |",
        "|---|---|---|---|---|",
    ]
    for policy, factor in wanted:
        balance, time = (
            next(
                row
                for row in found
                if (row["trace"], row["cost_model"], row["policy"], row["factor"])
                == ("conv", cost_model, policy, factor)
            )
            for cost_model in ("paper", "h200")
        )
        lines.append(
            f"| {policy} | {float(balance['ratio_mean']):.4f} ({float(balance['ratio_p99']):.3f}) "
            f"| {float(time['bound_mean']):.3f} ({float(time['bound_p99']):.2f}) "
            f"| {float(balance['memory']):.2f} | {float(balance['loads_per_layer_step']):.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = Path(os.environ.get("MOELESS_DATA_DIR", "."))
    parser.add_argument("--data", type=Path, default=data, help="default: MOELESS_DATA_DIR")
    parser.add_argument("--routing", type=Path, metavar="NPZ", help="in place of Mixtral's")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        default=Path.home() / ".cache/moeless/traces",
        help="traces of the demo models; missing ones are made there",
    )
    parser.add_argument("--only", metavar="TRACE,...", help="for example conv,code")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep reports; go on from them")
    parser.add_argument("--jobs", type=int, default=2, help="policies replayed at a time")
    options = parser.parse_args()
    options.routing = options.routing or data / "routing/mixtral-8x7b_mmlu_requests.npz"
    only = options.only.split(",") if options.only else None
    found: list[dict[str, Any]] = []
    for run in runs():
        if only is None or run.trace in only:
            found += rows(run, replay(run, options))
    options.out.mkdir(parents=True, exist_ok=True)
    header = provenance("simulated")
    with (options.out / "replay_targets.csv").open("w", newline="", encoding="utf-8") as file:
        file.write(header + "\n")
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    if only is None or "conv" in only:
        table = f"<!-- {header.removeprefix('# ')} -->\n\n{markdown(found)}"
        (options.out / "replay_table.md").write_text(table, encoding="utf-8")
        print(table)


if __name__ == "__main__":
    main()
