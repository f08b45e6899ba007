"""Reasons to refuse a bare table: numbers beside or in place of loads that nothing names.

A table without names is taken at its word only if it is plausible: ids, times, totals, tables
appended to each other and tables the wrong way round all give plans that look right. Each check
says how to tell that it is mistaken. This module must not know any file format.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads

MAX_LAYERS: Final = 512
"""More rows than this are layers only if the user says so; known models have up to 128."""

_TIME: Final = 1e8
"""Seconds since 1970 have been above this since 1973."""

_ALIKE, _UNALIKE = 0.9, 0.7
"""Correlation of two rows of one layer at different times, and of two layers at the most."""


def refuse_odd_table(
    loads: ExpertLoads, declared: Declared, *, layers_named: bool, experts_named: bool
) -> None:
    """Refuse what is hardly a matrix of loads, unless its shape is that of the declared model.

    Args:
        loads: Loads as the table has them.
        declared: The model; its experts and layers, where given and the same as the table's, say
            that all columns and rows are what they are taken for.
        layers_named: Each row has a layer id.
        experts_named: Each column has an expert's name.

    Raises:
        TraceError: A column of ids, times or totals, a row of totals, rows that repeat, too many
            of them, or a table that is the wrong way round.
    """
    if declared.num_experts is None and not experts_named:
        _refuse_columns(loads)
    if declared.num_layers is None:
        _refuse_total_row(loads)
        if not layers_named:
            _refuse_repeated_rows(loads)
            _refuse_many_layers(loads)
    if (declared.num_layers is None or declared.num_experts is None) and not experts_named:
        _refuse_transposed(loads)


def _refuse_columns(loads: ExpertLoads) -> None:
    table_LE, source = loads.loads_LE.astype(np.float64), loads.source
    layers, experts = table_LE.shape
    if experts < 2:
        return
    keep = f"(--experts {experts} if it is an expert's loads)"
    for column in (0, experts - 1):
        others = np.delete(table_LE, column, axis=1)
        if _counts_up(table_LE[:, column]) and not any(map(_counts_up, others.T)):
            first, second = table_LE[:2, column]
            raise TraceError(
                f"{source}: column {column + 1} counts {first:g}, {second:g}, ... as ids do; name "
                f"the columns in a header, or leave it out {keep}"
            )
        least = table_LE[:, column].min()
        if least > _TIME and least > 100 * others.max(initial=1.0):
            raise TraceError(
                f"{source}: column {column + 1} holds numbers like {least:.0f}, a time or an id; "
                f"leave it out {keep}"
            )
    column_or_none = _find_total(table_LE)
    if column_or_none is not None and layers > 1:
        raise TraceError(
            f"{source}: column {column_or_none + 1} is the sum of the others in every row, a "
            f"total; leave it out {keep}"
        )


def _counts_up(values: NDArray[np.float64]) -> bool:
    """Whether ids could be so: evenly upwards; two of them only from 0 to 1."""
    steps = np.diff(values)
    if len(values) < 3:
        return bool(values[0] == 0 and steps.tolist() == [1.0])
    return bool(steps[0] >= 1 and (steps == steps[0]).all())


def _find_total(table_LE: NDArray[np.float64]) -> int | None:
    """The column that is the sum of the others in all rows, if there are enough to tell."""
    if table_LE.shape[1] < 4:
        return None
    half_L = table_LE.sum(axis=1) / 2
    is_half_E = np.isclose(table_LE, half_L[:, None], rtol=1e-9).all(axis=0)
    # Rows with two experts that share the tokens are no evidence.
    busy_L = np.count_nonzero(table_LE, axis=1) > 2
    found = np.flatnonzero(is_half_E)
    return int(found[0]) if len(found) == 1 and busy_L.any() else None


def _refuse_total_row(loads: ExpertLoads) -> None:
    row = _find_total(loads.loads_LE.astype(np.float64).T)
    if row is not None and loads.num_experts > 1:
        raise TraceError(
            f"{loads.source}: row {row + 1} is the sum of the others, a total; leave it out "
            f"(--layers {loads.num_layers} if it is a layer)"
        )


def _refuse_repeated_rows(loads: ExpertLoads) -> None:
    """Tables appended to each other: layers differ, but each is much like itself later on."""
    layers, experts = loads.loads_LE.shape
    if layers < 4 or experts < 4:
        return
    rows = loads.loads_LE[: 4 * MAX_LAYERS].astype(np.float64)
    rows -= rows.mean(axis=1, keepdims=True)
    length_L = np.linalg.norm(rows, axis=1)
    rows /= np.where(length_L > 0, length_L, 1.0)[:, None]
    alike_LL = rows @ rows.T
    for lag in range(1, len(rows) // 2 + 1):
        alike = float(np.diagonal(alike_LL, lag).mean())
        if alike >= _ALIKE and lag > 1:
            raise TraceError(
                f"{loads.source}: {layers} rows, and each is like the one {lag} further down: "
                f"tables of {lag} layers one after the other; add them up to one row per layer "
                f"(--layers {layers} if these are layers)"
            )
        if alike > _UNALIKE:
            return


def _refuse_many_layers(loads: ExpertLoads) -> None:
    if loads.num_layers > MAX_LAYERS:
        raise TraceError(
            f"{loads.source}: {loads.num_layers} rows are more than any model has layers; add up "
            f"steps and ranks to one row per layer (--layers {loads.num_layers} if these are)"
        )


def _refuse_transposed(loads: ExpertLoads) -> None:
    """Every layer routes all tokens, so rows have equal sums; columns have them by no chance."""
    table_LE = loads.loads_LE.astype(np.float64)
    if min(table_LE.shape) < 3:
        return
    sums_L, sums_E = table_LE.sum(axis=1), table_LE.sum(axis=0)
    if np.allclose(sums_E, sums_E[0]) and sums_E[0] > 0 and not np.allclose(sums_L, sums_L[0]):
        layers, experts = table_LE.shape
        raise TraceError(
            f"{loads.source}: all {experts} columns have the same sum and the {layers} rows have "
            f"not, so columns are layers; transpose it (--layers {layers} --experts {experts} if "
            f"it is right)"
        )
