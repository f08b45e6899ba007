"""SGLang's placement, the JSON of ``--init-expert-location``.

``{"physical_to_logical_map": [[logical expert of each physical slot] per layer]}``. Rows are
absolute layers from 0; dense layers have rows too, which SGLang's own trivial placement fills with
``slot % experts``. Successive slots belong to a device, the same number to each.

Source: sgl-project/sglang, ``python/sglang/srt/eplb/expert_location.py``.
"""

import json
from pathlib import Path
from typing import Any

from moeless.errors import TraceError
from moeless.workloads.formats.placements.placement import (
    Placement,
    from_slot_rows,
    is_id_rows,
    slot_rows,
)
from moeless.workloads.formats.sglang import read_json

KEY = "physical_to_logical_map"


def format_sglang_map(placement: Placement) -> str:
    """Write a placement as text.

    Args:
        placement: The same number of replicas on every device and layer.

    Raises:
        ConfigError: Uneven numbers.
    """
    rows = dict(zip(placement.layer_ids, slot_rows(placement, system="SGLang"), strict=True))
    slots = len(rows[placement.layer_ids[0]])
    trivial = [slot % placement.num_experts for slot in range(slots)]
    every = [rows.get(layer, trivial) for layer in range(placement.layer_ids[-1] + 1)]
    return f'{{"{KEY}": [\n  ' + ",\n  ".join(json.dumps(row) for row in every) + "\n]}\n"


def read_sglang_map(path: Path, *, num_devices: int) -> Placement:
    """Read a placement file; layers are 0 to L - 1, dense ones included.

    Args:
        path: The file.
        num_devices: D, which the file does not say.

    Raises:
        TraceError: Not such a file.
    """
    return parse_sglang_map(read_json(path), num_devices=num_devices, source=path.name)


def parse_sglang_map(data: Any, *, num_devices: int, source: str) -> Placement:
    """Read a placement from decoded JSON.

    Args:
        data: The decoded file.
        num_devices: D.
        source: The file, for messages.

    Raises:
        TraceError: Not such a file.
    """
    rows = data.get(KEY) if isinstance(data, dict) else None
    if not rows or not is_id_rows(rows):
        raise TraceError(f"{source}: has no {KEY}: [[expert of each slot] per layer]")
    return from_slot_rows(
        rows, tuple(range(len(rows))), num_devices=num_devices, source=f"{source} (SGLang)"
    )
