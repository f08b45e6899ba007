"""How plots look: one colour per thing, the same in every figure."""

from collections.abc import Mapping
from typing import Any, Final

COLOURS: Final[dict[str, str]] = {
    "gate reuse": "#7f7f7f",
    "mlp": "#ff7f0e",
    "ridge": "#1f77b4",
    "finetune": "#2ca02c",
}

GOOD, BAD, PALE = "#1f77b4", "#d62728", "#dddddd"


def shades(count: int) -> list[tuple[float, float, float, float]]:
    """So many shades from dark to light, for what has an order."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * n / max(count - 1, 1)) for n in range(count)]


def accuracy_by_distance(
    figure: Any,
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    styles: Mapping[str, tuple[str, str]],
    labels: Mapping[str, str] | None = None,
) -> None:
    """A panel for each model: mean load accuracy of each predictor, by distance.

    Args:
        figure: Drawn into.
        panels: Accuracy by model, predictor and distance.
        styles: Colour and line of each predictor.
        labels: What each predictor is called, where not by its name.
    """
    axes = grid(figure, len(panels))
    for panel, (model, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            colour, style = styles[name]
            panel.plot(
                list(points),
                list(points.values()),
                style,
                color=colour,
                marker=".",
                label=(labels or {}).get(name, name),
            )
            panel.set_xticks(list(points))
        panel.set(title=model, xlabel="prediction distance d", ylabel="mean load accuracy")
        panel.grid(alpha=0.3)
    axes[-1].legend(fontsize="small")


def grid(figure: Any, count: int, *, columns: int = 2, **options: Any) -> list[Any]:
    """So many panels, row by row; what is left of the last row stays empty."""
    rows = -(-count // columns)
    panels = figure.subplots(rows, min(columns, count), squeeze=False, **options).ravel()
    for panel in panels[count:]:
        panel.set_visible(False)
    return list(panels[:count])
