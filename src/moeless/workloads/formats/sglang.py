"""Reads what SGLang's expert distribution recorder writes, as ``.pt`` or JSON.

The recorder's mode ``stat`` writes one file by rank 0: a dictionary with ``logical_count``
[buffered steps, layers, logical experts] int32, added up over all ranks, where ``layers`` counts
every layer of the model (dense ones stay zero) and steps that the ring buffer has not reached are
zero too. ``--init-expert-location`` takes the same dictionary as JSON, with or without steps.

Source: sgl-project/sglang, ``python/sglang/srt/eplb/expert_distribution.py`` and
``expert_location.py``.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeless.errors import TraceError
from moeless.workloads.formats.arrays import as_array
from moeless.workloads.formats.checks import as_counts, drop_dense_layers, sum_steps
from moeless.workloads.formats.expert_loads import ExpertLoads

TorchLoader = Callable[[Path], Any]
"""Loads a ``.pt`` file without running code, tensors as numpy arrays."""


def read_document(path: Path, *, load_torch: TorchLoader) -> Any:
    """What a ``.pt`` or a JSON file holds.

    Args:
        path: The file.
        load_torch: Opens ``.pt`` files; this package does without torch.

    Raises:
        TraceError: It cannot be read.
    """
    with path.open("rb") as file:
        archive = file.read(4) == b"PK\x03\x04"
    return load_torch(path) if archive else read_json(path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        TraceError: It is not JSON.
    """
    try:
        return json.loads(path.read_bytes())  # which knows UTF-16 and marks of byte order
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path.name}: not JSON: {error}") from error


def loads_of_dump(data: Any, *, name: str) -> ExpertLoads:
    """Add up the steps of a recorder dump.

    Args:
        data: What the file holds.
        name: The file.

    Raises:
        TraceError: Not a dump, or one that must not be planned from.
    """
    source = f"{name} (SGLang)"
    if not isinstance(data, Mapping):
        raise TraceError(f"{source}: no object with logical_count, and no array of loads")
    if "records" in data:
        raise TraceError(
            f"{source}: a per-pass dump holds one rank's counts of physical experts; record with "
            f"--expert-distribution-recorder-mode stat"
        )
    if "logical_count" not in data:
        if "physical_to_logical_map" in data:
            raise TraceError(
                f"{source}: a placement (physical_to_logical_map), not loads; give it as "
                f"--current, and a file with logical_count as loads"
            )
        known = ", ".join(str(key) for key in list(data)[:6]) or "nothing"
        raise TraceError(f"{source}: has {known}, expected logical_count")
    counts_SLE = _counts(data["logical_count"], source)
    _refuse_slots(counts_SLE.shape[2], data.get("physical_to_logical_map"), source)
    loads_LE, steps = sum_steps(counts_SLE, source=source)
    loads_LE, layer_ids = drop_dense_layers(loads_LE, range(len(loads_LE)), source=source)
    return ExpertLoads(loads_LE=loads_LE, layer_ids=layer_ids, source=source, steps=steps)


def _counts(values: Any, source: str) -> Any:
    array = as_array(values, source=f"{source}: logical_count")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or array.size == 0:
        raise TraceError(
            f"{source}: logical_count has shape {array.shape}, expected [steps, layers, experts]"
        )
    return as_counts(array, source=source)


def _refuse_slots(columns: int, slot_map: Any, source: str) -> None:
    """A file that brings its map too tells how many logical experts there are."""
    if slot_map is None:
        return
    slots_LP = np.asarray(slot_map)
    if slots_LP.ndim != 2 or slots_LP.size == 0 or slots_LP.dtype.kind not in "iu":
        raise TraceError(f"{source}: physical_to_logical_map is not [layers, slots] of ids")
    experts = int(slots_LP.max()) + 1
    if columns == slots_LP.shape[1] != experts:
        raise TraceError(
            f"{source}: logical_count has {columns} columns, one per physical slot, but the map "
            f"names {experts} logical experts; export counts of logical experts"
        )
