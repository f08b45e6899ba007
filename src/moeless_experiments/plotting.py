"""How plots look: one colour per thing, the same in every figure."""

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


def grid(figure: Any, count: int, *, columns: int = 2, **options: Any) -> list[Any]:
    """So many panels, row by row; what is left of the last row stays empty."""
    rows = -(-count // columns)
    panels = figure.subplots(rows, min(columns, count), squeeze=False, **options).ravel()
    for panel in panels[count:]:
        panel.set_visible(False)
    return list(panels[:count])
