"""What ``moeless plan`` shows: a table for people, JSON for programs."""

import io
import shutil
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from moeless.bootstrap.placements.explain_placement import explain_layer
from moeless.bootstrap.placements.placement_plan import LayerPlan, PlacementPlan
from moeless.workloads.formats.placements.moeless_json import format_placement

_DIGITS = 32
"""Experts up to which each one's number of replicas is shown."""

_WIDTH = 120
"""Columns where the output is no terminal."""


def report_json(planned: PlacementPlan, *, explain: bool, only: int | None) -> str:
    """The placement with its figures.

    Args:
        planned: The plan.
        explain: Add each expert's reason.
        only: Absolute layer to which figures and reasons are limited; the placement is whole.
    """
    layers = [
        _figures(planned, layer, explain=explain)
        for layer in planned.layers
        if only in (None, layer.layer_id)
    ]
    report = {
        "policy": planned.policies.name,
        "loads": planned.task.loads.source,
        "balance_is": _meaning(planned),
        "slots_per_device": planned.capacity_D.tolist(),
        "copies": planned.copies,
        "copy_bytes": planned.copy_bytes(planned.copies),
        "layers": layers,
    }
    return format_placement(planned.placement, report=report)


def report_table(planned: PlacementPlan, *, explain: bool, only: int | None) -> str:
    """One line per layer, the totals, and on request one line per expert.

    Args:
        planned: The plan.
        explain: Add each expert's reason.
        only: Absolute layer to show alone.
    """
    shown = [layer for layer in planned.layers if only in (None, layer.layer_id)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(_layer_table(planned, shown))
    console.print(_totals(planned), style="dim")
    for layer in shown if explain else []:
        console.print(_reason_table(planned, layer))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _figures(planned: PlacementPlan, layer: LayerPlan, *, explain: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "layer": layer.layer_id,
        "tokens": float(layer.load_E.sum()),
        "balance": {"static": layer.static, "even": layer.even, "min_time": layer.min_time},
        "replicas": layer.replicas_ED.sum(axis=1, dtype=int).tolist(),
        "copies": layer.copies,
        "copy_bytes": planned.copy_bytes(layer.copies),
        "filled": layer.filled,
    }
    if explain:
        figures["experts"] = [asdict(reason) for reason in explain_layer(planned, layer)]
    return figures


def _layer_table(planned: PlacementPlan, shown: list[LayerPlan]) -> Table:
    per_device = planned.capacity_D
    slots = (
        f"{per_device.min()}"
        if per_device.min() == per_device.max()
        else (f"{per_device.min()} or {per_device.max()}")
    )
    table = Table(
        title=f"{planned.policies.name} on {len(per_device)} devices with {slots} slots each: "
        f"{planned.task.loads.source}",
        title_justify="left",
        pad_edge=False,
    )
    for name in ("layer", "tokens", "static", "even split", "min-time split"):
        table.add_column(name, justify="right")
    table.add_column("replicas per expert", overflow="fold")
    table.add_column("to copy", justify="right")
    for layer in shown:
        table.add_row(
            str(layer.layer_id),
            f"{layer.load_E.sum():,.0f}",
            *(_ratio(value) for value in (layer.static, layer.even, layer.min_time)),
            _replicas(layer),
            _copied(planned, layer.copies),
        )
    return table


def _replicas(layer: LayerPlan) -> str:
    count_E = layer.replicas_ED.sum(axis=1, dtype=int)
    if len(count_E) <= _DIGITS:
        return " ".join(str(count) for count in count_E)
    return f"{count_E.sum()} in all, most {count_E.max()} (expert {count_E.argmax()})"


def _totals(planned: PlacementPlan) -> str:
    busy = [layer for layer in planned.layers if layer.static is not None]
    copied = f"{_copied(planned, planned.copies)}."
    where = "static expert parallelism" if planned.task.current is None else "--current"
    if not busy:
        return (
            f"No layer has a token, so there is nothing to balance. To copy from {where}: {copied}"
        )
    means = [
        f"{sum(getattr(layer, name) or 0 for layer in busy) / len(busy):.3f}"
        for name in ("static", "even", "min_time")
    ]
    lines = [
        f"static, even split, min-time split: {_meaning(planned)}, before and after; 1 is the "
        f"best.",
        f"All layers: {means[0]} before; {means[1]} with an even split, {means[2]} with a "
        f"min-time split after the gate. To copy from {where}: {copied}",
    ]
    if any(layer.filled for layer in planned.layers):
        lines.append("Some replicas only fill slots, which the format has equally many of.")
    return "\n".join(lines)


def _meaning(planned: PlacementPlan) -> str:
    if planned.task.timed:
        return "the least possible layer time / the layer time"
    return "balancedness, mean / max device tokens"


def _reason_table(planned: PlacementPlan, layer: LayerPlan) -> Table:
    table = Table(
        title=f"Layer {layer.layer_id}, expert by expert",
        title_justify="left",
        pad_edge=False,
    )
    for name in ("expert", "tokens", "x mean", "replicas"):
        table.add_column(name, justify="right")
    table.add_column("devices", overflow="fold")
    table.add_column("next gains", justify="right")
    table.add_column("why", overflow="fold")
    for reason in explain_layer(planned, layer):
        table.add_row(
            str(reason.expert),
            f"{reason.tokens:,.0f}",
            "-" if reason.share is None else f"{reason.share:.2f}",
            str(len(reason.devices)),
            " ".join(str(device) for device in reason.devices),
            f"{reason.next_gain:.1%}",
            reason.why,
        )
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _copied(planned: PlacementPlan, copies: int) -> str:
    size = planned.copy_bytes(copies)
    what = f"{copies} replica{'' if copies == 1 else 's'}"
    return what if size is None else f"{what}, {size / 1e9:,.2f} GB"
