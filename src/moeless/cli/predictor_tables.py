"""What the commands of ``moeless predictor`` print."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_profile(console: Console, report: dict[str, Any]) -> None:
    """Print a row per layer, and accuracy and similarity per distance."""
    console.print(
        f"{report['model']}: copied gates, {report['tokens']:,} tokens in {report['batches']} "
        f"batches of {report['batch']}",
        highlight=False,
    )
    distances = report["distances"]
    table = _table("layer")
    for distance in distances:
        table.add_column(f"accuracy d={distance}", justify="right")
    for distance in distances:
        table.add_column(f"cosine d={distance}", justify="right")
    for layer in range(report["layers_in_model"]):
        table.add_row(
            str(layer),
            *(_share(found["load_accuracy"][layer]) for found in distances.values()),
            *(_share(found["cosine"][layer]) for found in distances.values()),
        )
    table.add_section()
    table.add_row(
        "mean",
        *(_share(found["mean_load_accuracy"]) for found in distances.values()),
        *(_share(found["mean_cosine"]) for found in distances.values()),
    )
    console.print(table)


def print_training(console: Console, report: dict[str, Any]) -> None:
    """Print a row per layer, and what was gained."""
    table = _table("layer")
    for name in ("copied gate", "now", "expected error", "model"):
        table.add_column(name, justify="right")
    for layer in report["layers"]:
        table.add_row(
            str(layer["layer"]),
            _share(layer["accuracy_before"]),
            _share(layer["accuracy_after"]),
            _share(layer["error"]["mean"][-1] if layer["error"] else None),
            _model(layer),
        )
    table.add_section()
    table.add_row(
        "mean", _share(report["accuracy_before"]), _share(report["accuracy_after"]), "", ""
    )
    console.print(table)
    fit, held_out = report["tokens"]["fit"], report["tokens"]["held_out"]
    console.print(
        f"{report['layers_trained']} of {len(report['layers'])} layers trained in "
        f"{report['took_s']:.1f} s on {fit:,} tokens; accuracy on {held_out:,} held-out tokens; "
        f"{report['predictor_bytes'] / 2**20:.2f} MiB in {report['out']}",
        highlight=False,
    )


def print_evaluation(console: Console, report: dict[str, Any]) -> None:
    """Print a table per batch size, a row per predictor."""
    recording = "held-out part of its own" if report["same_recording"] else "held-out part of a"
    console.print(
        f"{report['model']}: distance {report['distance']}, {report['tokens']:,} tokens of the "
        f"{recording} recording, {report['batching']} batches",
        highlight=False,
    )
    sizes = {size for each in report["predictors"].values() for size in each["batches"]}
    for size in sorted(sizes, key=int):
        table = _table("predictor", f"batches of {size}")
        for name in ("accuracy", "hottest", "max error", "Pearson r", "recall", "size"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, each in report["predictors"].items():
            scores = each["batches"].get(size)
            if scores is None:
                continue
            table.add_row(
                name,
                _share(scores["load_accuracy"]),
                _share(scores["hot_hit_rate"]),
                _share(scores["max_load_error"]),
                _share(scores["pearson_r"]),
                _share(each["token_recall"]),
                "" if each["num_bytes"] is None else f"{each['num_bytes'] / 2**20:.2f} MiB",
            )
        console.print(table)


def _table(first: str, title: str | None = None) -> Table:
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left"
    )
    table.add_column(first, no_wrap=True)
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _model(layer: dict[str, Any]) -> str:
    if not layer["trained"]:
        return "copied"
    if layer["penalty"] is not None:
        return f"re-fitted, penalty {layer['penalty']:g}"
    return f"{layer['epochs']} epochs"
