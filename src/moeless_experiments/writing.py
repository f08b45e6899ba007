"""Results on disk: ``OUT/fig07/`` with CSV files, pictures, and ``manifest.json``."""

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeless.errors import ConfigError, MissingExtraError
from moeless_experiments.figure import Cell, Plot, Result, Table

MANIFEST_FILE = "manifest.json"

_DIGITS = ".6g"


def require_writable(out: Path) -> None:
    """Make the directory of results, before anything takes long.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror or error}); name another directory"
        ) from error


def require_matplotlib() -> None:
    """Say early that pictures cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "pictures need matplotlib; run pip install 'moeless[experiments]'"
        ) from error


def write_result(
    directory: Path, result: Result, describe: Callable[[], Mapping[str, Any]]
) -> None:
    """Write a result; one of before is replaced once the new one is whole.

    Args:
        directory: Of this experiment.
        result: What came out.
        describe: Makes the manifest.

    Raises:
        ConfigError: It cannot be written.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for table in result.tables:
            write_table(partial / f"{table.name}.csv", table)
        for plot in result.plots:
            draw_plot(partial, plot)
        text = json.dumps(describe(), indent=1, ensure_ascii=False)
        (partial / MANIFEST_FILE).write_text(text + "\n", "utf8")
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror or error}); name another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_table(path: Path, table: Table) -> None:
    """Write a CSV file: the same cells are the same bytes everywhere."""
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([_text(cell) for cell in row] for row in table.rows)


def draw_plot(directory: Path, plot: Plot) -> None:
    """Draw a picture as PNG, and as SVG where it is small."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without these an SVG has random ids and the hour in it.
    with mpl.rc_context({"svg.hashsalt": plot.name, "svg.fonttype": "none"}):
        figure = Figure(figsize=plot.inches, layout="constrained")
        plot.draw(figure)
        figure.savefig(directory / f"{plot.name}.png", dpi=110)
        if plot.vector:
            figure.savefig(directory / f"{plot.name}.svg", metadata={"Date": None})


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return format(cell, _DIGITS) if isinstance(cell, float) else str(cell)
