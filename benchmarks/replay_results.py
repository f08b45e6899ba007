"""The balance table of the README, from a routing trace and an arrival trace.

Run ``MOELESS_DATA_DIR=... python benchmarks/replay_results.py [--out results/]``. It looks for
``routing/mixtral-8x7b_mmlu_requests.npz`` and ``arrivals/AzureLLMInferenceTrace_{conv,code}.csv``
there, or takes other files by ``--routing`` and ``--arrivals``. All figures are simulated; each
run is one ``moeless replay`` command, which is printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

POLICIES = "static,eplb,swift,paper,moeless,oracle"
COLUMNS = (
    ("straggler ratio", "straggler_ratio"),
    ("layer time, ms", "layer_forward_ms"),
    ("layer time / bound", "bound_ratio"),
)


def replay(arguments: list[str]) -> dict:
    """Run one replay and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = ["moeless", "replay", *arguments, "--json", str(out)]
        print("$", " ".join(command[:-2]), file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def rows(figures: dict, label: str) -> list[str]:
    """Markdown rows, one per policy."""
    lines = []
    for policy, found in figures["policies"].items():
        cells = [f"{found[key]['mean']:.4f} ({found[key]['p99']:.3f})" for _, key in COLUMNS]
        cells.append(f"{found['memory_factor']:.2f}")
        cells.append(f"{found['cold_starts_per_layer_step']:.4f}")
        cells.append(f"{found['blocking_loads_per_layer_step']:.4f}")
        lines.append(f"| {label} | {policy} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = Path(os.environ.get("MOELESS_DATA_DIR", "."))
    parser.add_argument(
        "--routing", type=Path, default=data / "routing/mixtral-8x7b_mmlu_requests.npz"
    )
    parser.add_argument("--arrivals", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    arrivals = given.arrivals or [
        data / f"arrivals/AzureLLMInferenceTrace_{name}.csv" for name in ("conv", "code")
    ]
    lines = [
        "| run | policy | "
        + " | ".join(f"{name}, mean (p99)" for name, _ in COLUMNS)
        + " | memory / E | loads per layer-step | blocking |",
        "|---" * (len(COLUMNS) + 5) + "|",
    ]
    for trace in arrivals:
        for cost_model in ("paper", "h200", "a6000"):
            for factor in ("2.0", "1.5"):
                source = ["--routing", str(given.routing), "--arrivals", str(trace)]
                options = ["--cost-model", cost_model, "--memory-factor", factor, "--seed", "0"]
                only = ["--policies", POLICIES if factor == "2.0" else "eplb,swift,paper,moeless"]
                figures = replay([*source, *options, *only])
                name = trace.stem.rpartition("_")[2]
                lines += rows(figures, f"{name}, {cost_model}, {factor} E")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        note = "Simulated; written by `python benchmarks/replay_results.py --out DIR`.\n\n"
        (given.out / "replay_mixtral_azure.md").write_text(note + text)


if __name__ == "__main__":
    main()
