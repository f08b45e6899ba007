"""Reads vLLM's load statistics of EPLB: JSON, one record a line.

A record of type ``eplb_load_stats`` has ``expert_load`` [layers, slots], the tokens that each
*physical* slot computed in one window, and ``p2l_map`` [layers, slots], the logical expert that
was in it then (-1: none). Maps differ between windows. Records of other types (``eplb_load_meta``
and marks of benchmarks) hold no loads. Layers count MoE layers from 0.

Source: vllm-project/vllm, pull request 41141 (``tools/eplb/generate_static_mapping.py``).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.checks import as_counts, drop_dense_layers, sum_steps
from moeless.workloads.formats.expert_loads import ExpertLoads, LoadMatrix

RECORD_TYPE: Final = "eplb_load_stats"

_VERSION: Final = 1


def begins_with_record(path: Path) -> bool:
    """Whether the first line is a whole JSON object that has a record type."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, Mapping) and "record_type" in record


def read_vllm_stats(path: Path) -> ExpertLoads:
    """Add up the windows, each by its own map.

    Args:
        path: The file.

    Raises:
        TraceError: A line that is no record or is there twice, a map that does not fit, or
            windows of different models; the message names the line.
    """
    source = f"{path.name} (vLLM load statistics)"
    windows: list[LoadMatrix] = []
    seen: dict[str, int] = {}
    for line, record in _read_records(path, source):
        where = f"{source}: line {line}"
        counts_LE = _sum_slots(record, where)
        if windows and windows[0].shape != counts_LE.shape:
            raise TraceError(
                f"{where}: {counts_LE.shape[0]} layers of {counts_LE.shape[1]} experts after "
                f"{windows[0].shape[0]} of {windows[0].shape[1]}; give one model's file"
            )
        key = json.dumps([record.get("step"), record["expert_load"]])
        if key in seen:
            raise TraceError(
                f"{where}: the same as line {seen[key]} (step {record.get('step')}), so files "
                f"of several ranks were joined; give one of them"
            )
        seen[key] = line
        windows.append(counts_LE)
    if not windows:
        raise TraceError(f"{source}: no record of type {RECORD_TYPE}; record again")
    loads_LE, steps = sum_steps(np.stack(windows), source=source)
    loads_LE, layer_ids = drop_dense_layers(loads_LE, range(len(loads_LE)), source=source)
    return ExpertLoads(loads_LE=loads_LE, layer_ids=layer_ids, source=source, steps=steps)


def _read_records(path: Path, source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Records with loads, and their lines."""
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            cut = line == len(lines)
            reason = "the file ends within it; delete that line" if cut else "one record a line"
            raise TraceError(f"{source}: line {line} is not JSON: {reason}") from error
        if not isinstance(record, Mapping) or "record_type" not in record:
            raise TraceError(f"{source}: line {line} has no record_type")
        if record["record_type"] != RECORD_TYPE:
            continue
        if record.get("version") != _VERSION:
            raise TraceError(
                f"{source}: line {line}: version {record.get('version')!r}; known is {_VERSION}"
            )
        yield line, record


def _sum_slots(record: Mapping[str, Any], where: str) -> LoadMatrix:
    """Tokens of logical experts [L, E]."""
    load_LP = as_counts(_matrix(record, "expert_load", where), source=where)
    map_LP = _matrix(record, "p2l_map", where)
    if map_LP.dtype.kind not in "iu" or map_LP.shape != load_LP.shape:
        raise TraceError(
            f"{where}: p2l_map {list(map_LP.shape)} of {map_LP.dtype} does not go with "
            f"expert_load {list(load_LP.shape)}; both are [layers, slots]"
        )
    if not (np.isfinite(load_LP) & (load_LP >= 0)).all():
        raise TraceError(f"{where}: expert_load has a value that is no token count")
    rows, slots = np.nonzero(map_LP >= 0)
    ids = map_LP[rows, slots]
    counts_LE = np.zeros((len(map_LP), max(int(map_LP.max()) + 1, 1)), dtype=load_LP.dtype)
    held_LE = np.zeros(counts_LE.shape, dtype=np.bool_)
    held_LE[rows, ids] = True
    if not held_LE.all():
        layer, expert = np.argwhere(~held_LE)[0]
        raise TraceError(
            f"{where}: p2l_map of layer {layer} has no slot of expert {expert}; give a record of "
            f"all ranks"
        )
    if map_LP.min() < -1 or load_LP[map_LP < 0].any():
        raise TraceError(f"{where}: a slot without an expert (-1 in p2l_map) has tokens")
    np.add.at(counts_LE, (rows, ids), load_LP[rows, slots])
    return counts_LE


def _matrix(record: Mapping[str, Any], key: str, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(record.get(key))
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: {key} has rows of unequal length") from error
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iuf":
        raise TraceError(f"{where}: {key} has shape {array.shape}, expected [layers, slots]")
    return array
