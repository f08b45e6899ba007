"""The table of what experts did, from a JSON snapshot of a running model."""

from typing import Any

from rich.console import Console
from rich.table import Table

_BARS = "▁▂▃▄▅▆▇█"


def print_experts(console: Console, snapshot: dict[str, Any]) -> None:
    """Print one line per layer and the totals.

    Args:
        console: Where to.
        snapshot: ``RuntimeSnapshot.to_dict()``.
    """
    table = Table(
        title=f"What the experts of {snapshot['model']} did, layer by layer",
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    table.add_column("tokens per expert", no_wrap=True)
    table.add_column("hottest", justify="right", no_wrap=True)
    table.add_column("replicas", justify="right")
    table.add_column("straggler", justify="right")
    table.add_column("warm", justify="right")
    table.add_column("cold", justify="right")
    for name in ("billed", "resident", "reserved", "paper"):
        table.add_column(name, justify="right")
    for layer, row in enumerate(_rows(snapshot)):
        table.add_row(str(layer), *row)
    console.print(table)
    gb_s = snapshot["gb_s"]
    ahead_us = snapshot["forecast_s"]["p50_s"] * 1e6
    console.print(
        "straggler = largest device load / mean; warm = invocations that found their expert "
        "warm; cold = experts loaded onto a device;\n"
        "billed, resident, reserved, paper = GB·s in four accountings: executing, on a device, "
        "whole devices, and the paper's comparison.",
        style="dim",
        highlight=False,
    )
    console.print(
        f"GB·s in all: billed {gb_s['billed']:.4g}, resident {gb_s['resident']:.4g}, reserved "
        f"{gb_s['reserved']:.4g}, paper {gb_s['paper']:.4g}\n"
        f"plans ready before the gate spoke {snapshot['plans_early_share']:.2%}, planned "
        f"replicas warm by then {snapshot['replicas_warm_share']:.2%}; looking ahead took "
        f"{ahead_us:.0f} µs a layer (median), nothing waits for a plan\n"
        f"warm starts {snapshot['warm_starts']}, cold starts {snapshot['cold_starts']}, "
        f"of which a token waited for {snapshot['blocking_loads']}",
        highlight=False,
    )


def _rows(snapshot: dict[str, Any]) -> list[list[str]]:
    rows = []
    for layer, tokens in enumerate(snapshot["tokens"]):
        most, total = max(tokens), sum(tokens)
        bars = "".join(_BARS[min(7, int(8 * t / max(most, 1)))] if t else "·" for t in tokens)
        replicas = sum(sum(devices) for devices in snapshot["replicas"][layer])
        straggler = snapshot["straggler_mean"][layer]
        heat = most * len(tokens) / total if total else 0.0
        per_layer = snapshot["gb_s_by_layer"]
        rows.append(
            [
                bars,
                f"{tokens.index(most)} ({heat:.1f}x)",
                str(replicas),
                "-" if straggler is None else f"{straggler:.3f}",
                str(snapshot["warm_starts_by_layer"][layer]),
                str(snapshot["cold_starts_by_layer"][layer]),
                *(
                    f"{per_layer[name][layer]:.3g}"
                    for name in ("billed", "resident", "reserved", "paper")
                ),
            ]
        )
    return rows
