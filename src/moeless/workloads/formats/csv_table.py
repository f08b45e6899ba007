"""Reads a table of loads as text: a row per layer, a column per logical expert.

Commas, semicolons, tabs or spaces separate cells; ``#`` begins a comment line; UTF-8 or, with a
mark, UTF-16. A first line that names columns is a header: ``layer`` (``Layer ID``, ``layer_idx``
and so on; any position) has absolute layers, an empty first name is the index that pandas writes,
``e0``, ``expert_1``, ``3`` or letters are experts, ``total`` is held against the others and left
out. Whatever else has a name, or looks like no load without one, is refused: a column of ids or
times that is taken for an expert gives a plan that looks right and is wrong.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.checks import as_counts, refuse_missing_layers
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads
from moeless.workloads.formats.table_checks import refuse_odd_table

_NUMBER: Final = re.compile(r"[-+]?(\d.*|\.\d.*|nan|inf(inity)?)", re.IGNORECASE)
"""Meant as a number; a typo within one makes no header."""

_LAYER: Final = re.compile(r"(moe |decoder )?(layer|block)s?( ?(id|idx|index|no|nr|num|number))?")
_INDEX: Final = re.compile(r"|unnamed ?\d*|index|row")
_TOTAL: Final = re.compile(r"(row )?(total|sum)s?( of)?( tokens| loads?)?")
_NUMBERED: Final = re.compile(r"(.*?) ?(\d{1,6})")
_LABEL: Final = re.compile(r"(?:moe |decoder )?(?:layers?|block|l) ?(\d{1,6})")
_SLOTS: Final = ("slot", "phys", "phy", "replica")
_OTHERS: Final = re.compile(
    r"(rank|dev|device|npu|gpu|node|step|iter|iteration|window|t|time|token)s?"
)
_THOUSANDS: Final = re.compile(r"[1-9]\d{0,2}(\.\d{3})+")


class _Row(NamedTuple):
    line: int
    cells: list[str]


class _Columns(NamedTuple):
    """Where what is; ``experts`` in the order of their numbers, ``layer`` None without ids."""

    layer: int | None
    experts: list[int]
    totals: list[int]
    named: bool


def read_csv_loads(path: Path, declared: Declared) -> ExpertLoads:
    """Read a table of loads.

    Args:
        path: The file.
        declared: The model; a number of experts or layers that agrees with the table settles what
            could be one or something else.

    Raises:
        TraceError: No rows, rows of unequal length, a cell that is not a number, a column that is
            no expert, or layers that are missing or there twice; the message names line or column.
    """
    source = f"{path.name} (CSV)"
    rows, separator = _read_rows(path, source)
    header = _take_header(rows, source)
    if not rows:
        raise TraceError(f"{source}: no rows; expected a row of loads per layer")
    width = len(header or rows[0].cells)
    for line, cells in rows:
        if len(cells) != width:
            raise TraceError(f"{source}: line {line} has {len(cells)} cells, expected {width}")
    columns = _find_columns(header, rows, source)
    if not columns.experts:
        raise TraceError(f"{source}: only a column of layers; expected a column per expert")
    if separator in ";\t":
        _refuse_dotted_thousands(rows, columns, source)
    table = np.array([[_number(row, at, source) for at in columns.experts] for row in rows])
    _check_totals(table, rows, columns, header, source)
    layer_ids = tuple(range(len(table)))
    if columns.layer is not None:
        layer_ids, table = _order_layers(table, rows, columns.layer, source)
    loads = ExpertLoads(
        loads_LE=as_counts(table, source=source), layer_ids=layer_ids, source=source, steps=1
    )
    refuse_odd_table(
        loads, declared, layers_named=columns.layer is not None, experts_named=columns.named
    )
    return loads


def _read_rows(path: Path, source: str) -> tuple[list[_Row], str]:
    data = path.read_bytes()
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: not a text file, so no CSV table") from error
    lines = text.splitlines()
    first = next(
        (line for line in lines if line.strip() and not line.lstrip().startswith("#")), ""
    )
    separator = next((mark for mark in "\t;," if mark in first), " ")
    try:
        found = list(_split(lines, separator))
    except csv.Error as error:
        raise TraceError(f"{source}: no CSV table ({error})") from error
    if found and all(len(row.cells) > 1 and row.cells[-1] == "" for row in found):
        found = [_Row(row.line, row.cells[:-1]) for row in found]  # lines that end in a separator
    return found, separator


def _split(lines: list[str], separator: str) -> Iterator[_Row]:
    """Rows that are neither blank nor comments."""
    split = (line.split() for line in lines)
    rows = split if separator == " " else csv.reader(lines, delimiter=separator)
    for line, cells in enumerate(rows, start=1):
        kept = [cell.strip() for cell in cells]
        if any(kept) and not kept[0].startswith("#"):
            yield _Row(line, kept)


def _take_header(rows: list[_Row], source: str) -> list[str]:
    """Take the first row away if it names columns; empty if it has loads."""
    if not rows:
        return []
    line, cells = rows[0]
    if cells[0] == "" or not all(_NUMBER.fullmatch(cell) for cell in cells if cell):
        labels = [_LABEL.fullmatch(_normal(row.cells[0])) for row in rows]
        # "layer 0" in front of every row, the first one included: labels, and no header.
        plain = all(_NUMBER.fullmatch(cell) for cell in cells[1:])
        return [] if plain and all(labels) and len(cells) > 1 else rows.pop(0).cells
    experts = len(cells)
    if experts > 1 and cells == [str(number) for number in range(experts)]:
        return rows.pop(0).cells
    if experts > 2 and len(rows) > 1 and cells == [str(n) for n in range(1, experts + 1)]:
        raise TraceError(
            f"{source}: line {line} counts from 1 to {experts}, as a header would; write a header "
            f"(e1,e2,...) in its place, or above it if these are loads"
        )
    return []


def _find_columns(header: list[str], rows: list[_Row], source: str) -> _Columns:
    width = len(rows[0].cells)
    if not header:
        labelled = not _NUMBER.fullmatch(rows[0].cells[0])
        experts = list(range(1 if labelled else 0, width))
        return _Columns(0 if labelled else None, experts, [], named=False)
    names = [_normal(name) for name in header]
    layers = [at for at, name in enumerate(names) if _LAYER.fullmatch(name)]
    if len(layers) > 1:
        shown = " and ".join(repr(header[at]) for at in layers[:2])
        raise TraceError(f"{source}: columns {shown} both have layers; leave one of them out")
    index = 0 if _INDEX.fullmatch(names[0]) else None
    totals = [at for at, name in enumerate(names) if _TOTAL.fullmatch(name)]
    rest = [at for at in range(width) if at not in {index, *layers, *totals}]
    layer = layers[0] if layers else index
    numbers = _expert_numbers(rest, names, header, source)
    return _Columns(layer, [at for _, at in sorted(zip(numbers, rest, strict=True))], totals, True)


def _expert_numbers(
    rest: list[int], names: list[str], header: list[str], source: str
) -> list[int]:
    """The expert of each column; they must be all of them, from 0 or from 1 up."""
    if [names[at] for at in rest] == [chr(ord("a") + n) for n in range(len(rest))]:
        return list(range(len(rest)))
    found: dict[int, int] = {}
    stem = None
    for at in rest:
        match = _NUMBERED.fullmatch(names[at])
        if match is None or _OTHERS.fullmatch(match[1]):
            raise _foreign(header[at], at, names, source)
        if _LAYER.fullmatch(match[1]) or match[1] == "l":
            raise TraceError(
                f"{source}: column {header[at]!r} is a layer; transpose the table: a row per "
                f"layer, a column per expert"
            )
        if match[1].startswith(_SLOTS):
            raise TraceError(
                f"{source}: column {header[at]!r} is a physical slot, whose meaning changes with "
                f"every placement; export counts of logical experts"
            )
        stem = match[1] if stem is None else stem
        if match[1] != stem:
            raise _foreign(header[at], at, names, source)
        if int(match[2]) in found:
            twice = header[found[int(match[2])]]
            raise TraceError(
                f"{source}: columns {twice!r} and {header[at]!r} of line 1 are one expert, or "
                f"line 1 is no header; name each column once (e0,e1,...)"
            )
        found[int(match[2])] = at
    if sorted(found) not in (list(range(len(found))), list(range(1, len(found) + 1))):
        missing = next(n for n in range(1, max(found) + 1) if n not in found)
        raise TraceError(
            f"{source}: the header has no expert {missing}, but {header[found[max(found)]]!r}; "
            f"give all experts of the model a column"
        )
    return list(found)


def _foreign(name: str, at: int, names: list[str], source: str) -> TraceError:
    if re.match(r"(logical )?experts?( ?(id|idx|index))?$", names[at]):
        form = "pivot" if any(_LAYER.fullmatch(other) for other in names) else "transpose"
        return TraceError(
            f"{source}: column {name!r} has expert ids; {form} the table: a row per layer, a "
            f"column per expert"
        )
    return TraceError(
        f"{source}: column {at + 1}, {name!r}, is neither the layers (layer, layer_id) nor an "
        f"expert (e0, expert_1, 2, ...); leave it out or name it so"
    )


def _normal(name: str) -> str:
    """Lower case, with one space for whatever separates words."""
    return re.sub(r"[\W_]+", " ", name.lower()).strip()


def _number(row: _Row, at: int, source: str) -> float:
    cell = row.cells[at]
    if not cell:
        raise TraceError(f"{source}: line {row.line}, column {at + 1}: an empty cell; write 0")
    try:
        return float(cell)
    except ValueError as error:
        advice = "; write 1234.5 so, without separators" if re.search(r"\d[,' ]\d", cell) else ""
        raise TraceError(f"{source}: line {row.line}: {cell!r} is not a number{advice}") from error


def _refuse_dotted_thousands(rows: list[_Row], columns: _Columns, source: str) -> None:
    """Beside semicolons, 1.234 may be a thousand: where all points are so placed, who knows."""
    dotted = [
        (row.line, row.cells[at]) for row in rows for at in columns.experts if "." in row.cells[at]
    ]
    if dotted and all(_THOUSANDS.fullmatch(cell) for _, cell in dotted):
        line, cell = dotted[0]
        raise TraceError(
            f"{source}: line {line}: {cell!r} may be {cell.replace('.', '')} or a fraction; write "
            f"thousands without separators"
        )


def _check_totals(
    table_LE: NDArray[np.float64],
    rows: list[_Row],
    columns: _Columns,
    header: list[str],
    source: str,
) -> None:
    for at in columns.totals:
        for row, sum_ in zip(rows, table_LE.sum(axis=1), strict=True):
            value = _number(row, at, source)
            if not np.isclose(value, sum_, rtol=1e-3):
                raise TraceError(
                    f"{source}: line {row.line}: {header[at]!r} is {value:g}, but the experts add "
                    f"up to {sum_:g}; some are missing"
                )


def _order_layers(
    table: NDArray[np.float64], rows: list[_Row], column: int, source: str
) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    lines: dict[int, int] = {}
    for row in rows:
        cell = row.cells[column]
        match = _LABEL.fullmatch(_normal(cell)) or re.fullmatch(r"(\d{1,6})(?:\.0*)?", cell)
        if match is None:
            raise TraceError(f"{source}: line {row.line}: {cell!r} is not a layer; leave it out")
        layer = int(match[1])
        if layer in lines:
            raise TraceError(
                f"{source}: line {row.line}: layer {layer} again, after line {lines[layer]}: "
                f"windows or ranks one after the other; add them up to one row per layer"
            )
        lines[layer] = row.line
    ids = list(lines)
    order = np.argsort(ids)
    layer_ids = tuple(sorted(ids))
    refuse_missing_layers(layer_ids, source=source)
    return layer_ids, table[order]
