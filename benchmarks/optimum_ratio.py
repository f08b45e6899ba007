"""How far the default policy's splits are from the best ones over the same replicas, by MILP.

Run ``MOELESS_DATA_DIR=... python benchmarks/optimum_ratio.py --out results/replay/optimum.csv``.
Traces, time models and memories are those of ``replay_results`` that have a GPU's time model;
each is one ``moeless replay --optimum`` command, which is printed. Simulated. The optimum knows
all token counts and may take 2 seconds for a layer; where scipy does not prove one in that time
the sample is counted as timed out, and in no mean.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance
from replay_results import DEVICES, Run, runs, source

LIMIT = 1.02
COLUMNS = ("trace", "cost_model", "factor", "steps", "samples", "timed_out", "mean", "p99", "met")


def compare(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Replay one and sample it."""
    steps = min(options.steps, run.max_steps or options.steps)
    command = ["replay", *source(run.trace, options), "--devices", str(DEVICES), "--seed", "0"]
    command += ["--cost-model", run.cost_model, "--memory-factor", str(run.factor)]
    command += ["--policies", "moeless", "--prediction", run.prediction]
    command += ["--max-steps", str(steps), "--optimum", str(options.samples)]
    print("$ moeless", *command, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        done = subprocess.run(
            [sys.executable, "-m", "moeless", *command, "--no-progress", "--json", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            sys.exit(done.stderr.strip() or f"moeless replay ended with {done.returncode}")
        report = json.loads(out.read_text(encoding="utf-8"))
    (policy,) = report["policies"].values()
    found = policy["optimum"]
    return {
        "trace": run.trace,
        "cost_model": run.cost_model,
        "factor": run.factor,
        "steps": steps,
        "samples": found["samples"],
        "timed_out": found["timed_out"],
        "mean": round(found["ratio"]["mean"], 5),
        "p99": round(found["ratio"]["p99"], 5),
        "met": "yes" if found["ratio"]["mean"] <= LIMIT else "no",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = os.environ.get("MOELESS_DATA_DIR")
    parser.add_argument("--data", type=Path, default=data and Path(data), required=data is None)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=60)
    options = parser.parse_args()
    options.routing = options.data / "routing/mixtral-8x7b_mmlu_requests.npz"
    rows = [compare(run, options) for run in runs() if run.cost_model != "paper"]
    with options.out.open("w", newline="", encoding="utf-8") as file:
        file.write(provenance("simulated") + "\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"worst mean {max(row['mean'] for row in rows)}, target {LIMIT}")


if __name__ == "__main__":
    main()
