"""Balance and layer time against the memory that a policy really holds.

Run ``python benchmarks/memory_curve.py --out DIR --routing TRACE.npz ... [--arrivals CSV]``. Every
trace is replayed (``moeless replay``, simulated) with every cost model and memory factor; the
x axis is not the factor asked for but the mean number of warm replicas over E. Writes
``NAME.csv`` with all figures and ``NAME_COST.png`` for each cost model. Policies that have a whole
number of slots per device (eplb, swift) are replayed once for each number. They plan again after
``--eplb-interval`` and ``--swift-interval`` seconds: on a trace that is shorter than that they
never follow the loads, so choose intervals that end within the warm-up (the first tenth).
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

from moeless.bootstrap.policies import PolicyOptions, max_replicas

FACTORS = (1.0, 1.125, 1.25, 1.375, 1.5, 1.75, 2.0)
POLICIES = ("static", "eplb", "swift", "paper", "moeless")
STYLES = {
    "static": ("#666666", "X"),
    "eplb": ("#d55e00", "s"),
    "swift": ("#cc79a7", "^"),
    "paper": ("#0072b2", "D"),
    "moeless": ("#009e73", "o"),
}
"""Colour and marker; the colours are told apart by colour-blind readers, too."""


def replay(
    routing: Path, cost_model: str, factor: float, policies: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """One run of ``moeless replay``; its report."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "moeless", "replay", "--no-progress"]
        command += ["--routing", str(routing), "--cost-model", cost_model]
        command += ["--policies", ",".join(policies), "--memory-factor", str(factor)]
        command += ["--devices", str(options.devices), "--seed", str(options.seed)]
        command += ["--eplb-interval", str(options.eplb_interval)]
        command += ["--swift-interval", str(options.swift_interval)]
        command += ["--jobs", str(options.jobs), "--json", str(out)]
        if options.arrivals is not None:
            command += ["--arrivals", str(options.arrivals)]
        if options.max_steps is not None:
            command += ["--max-steps", str(options.max_steps)]
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            sys.exit(done.stderr.strip() or f"moeless replay ended with {done.returncode}")
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return report


def measure(routing: Path, cost_model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every policy and memory factor."""
    rows = []
    experts, known = 0, set[tuple[str, int | None]]()
    for factor in FACTORS:
        policies = []
        for name in POLICIES:
            replicas = max_replicas(
                name,
                PolicyOptions(memory_factor=factor),
                num_experts=experts,
                num_devices=options.devices,
            )
            # E is known from the first report on.
            if not experts or (name, replicas) not in known:
                policies.append(name)
        report = replay(routing, cost_model, factor, policies, options)
        trace = report["trace"]
        experts = trace["experts"]
        for name in policies:
            replicas = max_replicas(
                name,
                PolicyOptions(memory_factor=factor),
                num_experts=experts,
                num_devices=options.devices,
            )
            known.add((name, replicas))
            figures = report["policies"][name]
            rows.append(
                {
                    "trace": trace["model"],
                    "phase": trace["phase"],
                    "experts": experts,
                    "devices": options.devices,
                    "steps": trace["steps"],
                    "duration_s": round(trace["duration_s"]),
                    "cost_model": cost_model,
                    "policy": name,
                    "factor": "" if replicas is None else factor,
                    "memory_held": round(figures["memory_factor"], 4),
                    "straggler_mean": round(figures["straggler_ratio"]["mean"], 5),
                    "straggler_p99": round(figures["straggler_ratio"]["p99"], 4),
                    "layer_ms_mean": f"{figures['layer_forward_ms']['mean']:.6g}",
                    "layer_ms_p99": f"{figures['layer_forward_ms']['p99']:.6g}",
                    "bound_ratio_mean": round(figures["bound_ratio"]["mean"], 5),
                    "bound_ratio_p99": round(figures["bound_ratio"]["p99"], 4),
                    "cold_per_layer_step": round(figures["cold_starts_per_layer_step"], 5),
                    "blocking_per_layer_step": round(figures["blocking_loads_per_layer_step"], 5),
                }
            )
        print(f"{routing.name} {cost_model} {factor}: {', '.join(policies)}", flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Two panels, balance and layer time over static's; means are solid, p99 dotted and open."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels = (
        ("straggler_mean", "straggler_p99", "max ÷ ideal device tokens"),
        ("layer_ms_mean", "layer_ms_p99", "layer time ÷ that of static"),
    )
    static = next(row for row in rows if row["policy"] == "static")
    for axes, (mean, p99, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in POLICIES:
            mine = sorted(
                (row for row in rows if row["policy"] == name),
                key=lambda row: float(row["memory_held"]),
            )
            colour, marker = STYLES[name]
            held = [float(row["memory_held"]) for row in mine]
            over = static if mean.startswith("layer_ms") else {mean: 1.0, p99: 1.0}
            for key, line, face in ((mean, "-", colour), (p99, ":", "white")):
                axes.plot(
                    held,
                    [float(row[key]) / float(over[key]) for row in mine],
                    line,
                    color=colour,
                    marker=marker,
                    markersize=9 if name == "static" else 6,
                    markerfacecolor=face,
                    zorder=3 if name == "static" else 2,  # one point, which others may hit
                    linewidth=1.6 if line == "-" else 1.0,
                )
        axes.set(xlabel="mean warm replicas ÷ experts", ylabel=label)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.grid(visible=True, alpha=0.3)
    handles = [
        Line2D([], [], color=STYLES[name][0], marker=STYLES[name][1], label=name)
        for name in POLICIES
    ]
    handles += [
        Line2D([], [], color="black", linestyle="-", marker=".", label="mean"),
        Line2D(
            [], [], color="black", linestyle=":", marker="o", markerfacecolor="white", label="p99"
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    first = rows[0]
    figure.suptitle(
        f"{first['trace']}, {first['phase']}: {first['experts']} experts on {first['devices']} "
        f"devices, cost model {first['cost_model']} (simulated, {first['steps']} steps)",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)


def redraw(directory: Path) -> None:
    """Draw the pictures of all CSV files in a directory again."""
    for path in sorted(directory.glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        for cost_model in dict.fromkeys(row["cost_model"] for row in rows):
            draw(
                [row for row in rows if row["cost_model"] == cost_model],
                _picture(directory, path.stem, cost_model),
            )


def _picture(directory: Path, name: str, cost_model: str) -> Path:
    return directory / f"{name}_{Path(cost_model).stem}.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routing", type=Path, nargs="+", default=[], metavar="TRACE.npz")
    parser.add_argument(
        "--redraw", action="store_true", help="replay nothing, draw the CSV files in --out again"
    )
    parser.add_argument("--arrivals", type=Path, metavar="CSV", help="for traces of requests")
    parser.add_argument("--cost-models", default="paper,h200")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--eplb-interval", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--swift-interval", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--max-steps", type=int, help="replay only the first steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="policies replayed at a time")
    options = parser.parse_args()
    if options.redraw:
        redraw(options.out)
        return
    if not options.routing:
        parser.error("name one or more traces with --routing")
    options.out.mkdir(parents=True, exist_ok=True)
    header = provenance("simulated")
    for routing in options.routing:
        rows = []
        for cost_model in options.cost_models.split(","):
            found = measure(routing, cost_model, options)
            draw(found, _picture(options.out, routing.stem, cost_model))
            rows += found
        path = options.out / f"{routing.stem}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            file.write(header + "\n")
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
