"""Reads a bare CSV table: a row per layer, a column per logical expert.

A first line that is not numbers is a header; if its first cell is ``layer``, the first column has
absolute layer ids. Separators may be commas, semicolons or tabs; ``#`` starts a comment line.
"""

import csv
import re
from pathlib import Path

import numpy as np

from moeless.errors import TraceError
from moeless.workloads.formats.checks import as_counts, refuse_missing_layers
from moeless.workloads.formats.expert_loads import ExpertLoads

_LAYER_HEADERS = ("layer", "layer_id", "layer_idx")


def read_csv_loads(path: Path) -> ExpertLoads:
    """Read a table of loads.

    Args:
        path: The file.

    Raises:
        TraceError: No rows, rows of unequal length, a cell that is not a number, or missing
            layers; the message names the line.
    """
    source = f"{path.name} (CSV)"
    rows = _rows(path)
    header = rows.pop(0)[1] if rows and not _is_numbers(rows[0][1]) else []
    if not rows:
        raise TraceError(f"{source}: no rows; expected a row of loads per layer")
    with_ids = bool(header) and header[0].strip().lower() in _LAYER_HEADERS
    width = len(header) if header else len(rows[0][1])
    values = []
    for line, cells in rows:
        if len(cells) != width:
            raise TraceError(f"{source}: line {line} has {len(cells)} cells, expected {width}")
        values.append([_number(cell, line, source) for cell in cells])
    if with_ids and width == 1:
        raise TraceError(f"{source}: only a column of layers; expected a column per expert")
    table = np.asarray(values, dtype=np.float64)
    layer_ids = tuple(range(len(table)))
    if with_ids:
        layer_ids = tuple(_layer(row[0], source) for row in values)
        refuse_missing_layers(layer_ids, source=source)
        table = table[:, 1:]
    loads_LE = as_counts(table, source=source)
    return ExpertLoads(loads_LE=loads_LE, layer_ids=layer_ids, source=source, steps=1)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: not a text file, so no CSV table") from error
    separator = next((s for s in ",;\t" if s in text), ",")
    found = []
    for line, cells in enumerate(csv.reader(text.splitlines(), delimiter=separator), start=1):
        kept = [cell.strip() for cell in cells]
        if any(kept) and not kept[0].startswith("#"):
            found.append((line, kept))
    return found


def _is_numbers(cells: list[str]) -> bool:
    """Whether the cells were meant as numbers; a typo within one makes no header."""
    number = r"[-+]?(\d.*|\.\d.*|nan|inf(inity)?)"
    return all(re.fullmatch(number, cell, re.IGNORECASE) for cell in cells)


def _number(cell: str, line: int, source: str) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise TraceError(f"{source}: line {line}: {cell!r} is not a number") from error


def _layer(value: float, source: str) -> int:
    if not (np.isfinite(value) and value == int(value)):
        raise TraceError(f"{source}: layer {value} is not a layer id")
    return int(value)
