"""Questions to a ledger."""

import sqlite3
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moeless.telemetry.ledger.meter import KEY_FIELDS, MODEL_FIELDS

Grouping = Literal["key", "model", "function"]

_FUNCTION_FIELDS = ("tokens", "billed_gb_s", "resident_gb_s", "reserved_gb_s")
_KEY_SUMS = ", ".join(f"sum({name})" for name in KEY_FIELDS)
_MODEL_SUMS = ", ".join(f"sum({name})" for name in MODEL_FIELDS)


@dataclass(frozen=True, kw_only=True)
class UsageTable:
    """An answer.

    Args:
        columns: Their names.
        rows: Values in the order of the columns.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def read_usage(
    connection: sqlite3.Connection,
    *,
    by: Grouping,
    since_s: float | None = None,
    until_s: float | None = None,
) -> UsageTable:
    """Usage over all runs.

    Args:
        connection: Of ``open_ledger``.
        by: ``key`` (within each model), ``model``, or ``function`` (layer and expert).
        since_s: Leave out periods that ended before this Unix time: minutes of keys and models,
            hours of functions.
        until_s: Leave out periods that began at this Unix time or later.
    """
    low, high = since_s or 0.0, until_s if until_s is not None else 1e18
    if by == "key":
        rows = connection.execute(
            f"SELECT model, key, {_KEY_SUMS} FROM key_usage JOIN runs USING (run) "  # noqa: S608 - names of our own
            "WHERE period_s + 60 > ? AND period_s < ? GROUP BY model, key ORDER BY model, key",
            (low, high),
        ).fetchall()
        return UsageTable(columns=("model", "key", *KEY_FIELDS), rows=rows)
    if by == "model":
        return _by_model(connection, low, high)
    return _by_function(connection, low, high)


def count_missing_minutes(
    connection: sqlite3.Connection, *, since_s: float | None = None, until_s: float | None = None
) -> int:
    """Minutes of usage, of all runs, that could not be written for so long that they are lost.

    Args:
        connection: Of ``open_ledger``.
        since_s: Leave out gaps that ended before this Unix time.
        until_s: Leave out gaps that began at this Unix time or later.
    """
    known = "SELECT count(*) FROM sqlite_schema WHERE name = 'gaps'"
    if not connection.execute(known).fetchone()[0]:
        return 0  # written by an older release
    (minutes,) = connection.execute(
        "SELECT sum(minutes) FROM gaps WHERE last_s + 60 > ? AND first_s < ?",
        (since_s or 0.0, until_s if until_s is not None else 1e18),
    ).fetchone()
    return minutes or 0


def _by_model(connection: sqlite3.Connection, low: float, high: float) -> UsageTable:
    found: dict[str, tuple[Any, ...]] = {}
    for table, sums, width in (
        ("key_usage", _KEY_SUMS, len(KEY_FIELDS)),
        ("model_usage", _MODEL_SUMS, len(MODEL_FIELDS)),
    ):
        rows = connection.execute(
            f"SELECT model, {sums} FROM {table} JOIN runs USING (run) "  # noqa: S608 - names of our own
            "WHERE period_s + 60 > ? AND period_s < ? GROUP BY model",
            (low, high),
        ).fetchall()
        values = {model: tuple(rest) for model, *rest in rows}
        if table == "key_usage":
            found = values
        else:
            none = (0,) * len(KEY_FIELDS)
            found = {
                model: found.get(model, none) + values.get(model, (0.0,) * width)
                for model in found.keys() | values.keys()
            }
    counts = MODEL_FIELDS[4:]
    first = 1 + len(KEY_FIELDS) + 4
    rows = [(model, *values) for model, values in sorted(found.items())]
    rows = [row[:first] + tuple(int(value) for value in row[first:]) for row in rows]
    return UsageTable(columns=("model", *KEY_FIELDS, *MODEL_FIELDS[:4], *counts), rows=rows)


def _by_function(connection: sqlite3.Connection, low: float, high: float) -> UsageTable:
    sums: dict[tuple[str, int], list[Any]] = {}
    for model, layer, *parts in connection.execute(
        f"SELECT model, layer, {', '.join(_FUNCTION_FIELDS)} "  # noqa: S608 - names of our own
        "FROM function_usage JOIN runs USING (run) WHERE period_s + 3600 > ? AND period_s < ?",
        (low, high),
    ):
        values = np.stack([np.frombuffer(part, dtype="<f8") for part in parts])
        known = sums.setdefault((model, layer), [])
        # Under one model id there may once have been a model of another shape.
        same = next((i for i, v in enumerate(known) if v.shape == values.shape), None)
        if same is None:
            known.append(values)
        else:
            known[same] = known[same] + values
    rows = [
        (model, layer, expert, round(tokens), *costs)
        for (model, layer), tables in sorted(sums.items())
        for table in tables
        for expert, (tokens, *costs) in enumerate(table.T.tolist())
    ]
    return UsageTable(columns=("model", "layer", "expert", *_FUNCTION_FIELDS), rows=rows)
